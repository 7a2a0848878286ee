"""Other drivers on this node that sell whole or shared NVIDIA cards to pods: qgpu must not sell those cards too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import structlog

from qgpu.k8s.names import KubeletDirectory

_log = structlog.get_logger("k8s")

_CONNECT_S = 1.0


def find(kubelet: KubeletDirectory) -> str:
    """Return one line about a plugin of NVIDIA's or HAMi's that listens on this node; "" if there is none.

    A socket that nobody listens at was left by a plugin that is gone.
    """
    for path in _sockets(kubelet):
        if _listens(path):
            return (
                f"{path}: another driver sells this node's cards too; remove it from this node, "
                "or keep qgpu off the node by its label"
            )
    return ""


def check(kubelet: KubeletDirectory, known: str) -> str:
    """Return what ``find`` returns, and log a driver that was not ``known``."""
    if (conflict := find(kubelet)) not in ("", known):
        _log.error("no new pods on this node's cards", error=conflict)
    return conflict


def _sockets(kubelet: KubeletDirectory) -> Iterator[Path]:
    for directory, pattern in (
        (kubelet.registry, "*nvidia.com*"),
        (kubelet.plugins, "*nvidia.com*/*.sock"),
        (kubelet.device_plugins, "nvidia*.sock"),
    ):
        try:
            yield from sorted(path for path in directory.glob(pattern) if path.is_socket())
        except OSError:  # the directory has just gone
            continue


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # busy, or out of reach: in doubt it lives
            return True
    return True
