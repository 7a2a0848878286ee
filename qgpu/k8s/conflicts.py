"""Other drivers on this node that advertise NVIDIA cards, whole or shared: qgpu must not advertise those cards too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from qgpu.k8s.names import KubeletDirectory

_log = structlog.get_logger("k8s")

_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Product:
    """A product that hands out this node's cards too, and the names of its sockets in the kubelet's folders."""

    name: str
    #: The name of its DRA driver, which is the name of the registration socket and of the folder with its sockets.
    driver: str = ""
    #: Patterns of its device plugin's sockets.
    sockets: tuple[str, ...] = ()


_PRODUCTS = (
    _Product("NVIDIA's DRA driver", driver="*nvidia.com*"),
    _Product("HAMi's DRA driver", driver="*project-hami.io*"),  # hami-core-gpu.project-hami.io
    # HAMi's began as NVIDIA's and kept its names.
    _Product("NVIDIA's device plugin, or HAMi's,", sockets=("nvidia*.sock",)),
    # tkestack/gpu-manager pkg/server/vcore.go and vmemory.go
    _Product("Tencent's GPU manager", sockets=("vcore.sock", "vmemory.sock")),
    # AliyunContainerService/gpushare-device-plugin pkg/gpu/nvidia/const.go
    _Product("Alibaba's GPU sharing", sockets=("aliyungpushare.sock",)),
)


def find(kubelet: KubeletDirectory) -> str:
    """Return one line about a product that listens on this node; "" if there is none.

    A socket without a listener does not count: its plugin is gone.
    """
    for product in _PRODUCTS:
        for path in _sockets(kubelet, product):
            if _listens(path):
                return (
                    f"{path}: {product.name} advertises this node's cards too; remove it from this node, "
                    "or keep qgpu off the node by its label"
                )
    return ""


def check(kubelet: KubeletDirectory, known: str) -> str:
    """Return what ``find`` returns, and log a driver that was not ``known``."""
    if (conflict := find(kubelet)) not in ("", known):
        _log.error("no new pods on this node's cards", error=conflict)
    return conflict


def _sockets(kubelet: KubeletDirectory, product: _Product) -> Iterator[Path]:
    places = [(kubelet.device_plugins, pattern) for pattern in product.sockets]
    if product.driver:
        places += [(kubelet.registry, product.driver), (kubelet.plugins, f"{product.driver}/*.sock")]
    for directory, pattern in places:
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
        except OSError:  # busy or unreachable: assume that it runs
            return True
    return True
