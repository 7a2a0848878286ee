"""The options that both modes of ``qgpu-k8s`` have."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from qgpu import entry_point, units
from qgpu.errors import InvalidValueError
from qgpu.k8s.names import DEVICE_PLUGIN_DIR, KUBELET_DIR, KubeletDirectory
from qgpu.paths import default_runtime_dir


def _positive_size(text: str) -> int:
    if not (size := units.parse_memory(text)):
        raise InvalidValueError(f"{text!r} is nothing; write a size such as 256MiB")
    return size


#: A size such as 16GiB, in bytes; one that is not 0.
SIZE, POSITIVE_SIZE = (entry_point.Quantity("size", read) for read in (units.parse_memory, _positive_size))

reserve_option = click.option(
    "--reserve", type=SIZE, default="512MiB", show_default=True, help="Memory that every card keeps back."
)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Where this process runs: the daemon's directory, the kubelet's, and the name of the node."""

    runtime_dir: Path
    kubelet: KubeletDirectory
    node: str
    #: Seconds between looks at qgpud, at its own sockets, and at other drivers.
    interval_s: float


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where qgpud and the kubelet are; the command gets a ``NodeConfig``."""

    @click.option("--runtime-dir", type=entry_point.Directory(), help="Directory of qgpud's control socket.")
    @click.option(
        "--kubelet-dir",
        type=entry_point.Directory(),
        default=KUBELET_DIR,
        show_default=True,
        help="The kubelet's root directory.",
    )
    @click.option(
        "--device-plugin-dir",
        type=entry_point.Directory(),
        default=DEVICE_PLUGIN_DIR,
        show_default=True,
        help="Where the kubelet has its socket for device plugins.",
    )
    @click.option("--node-name", envvar="NODE_NAME", help="This node's name in Kubernetes; default: the host name.")
    @click.option(
        "--interval",
        type=entry_point.Seconds(0.01, 3600),
        default=1.0,
        show_default=True,
        help="Seconds between looks at qgpud, at its own sockets and at other drivers.",
    )
    @wraps(command)
    def run(
        runtime_dir: Path | None,
        kubelet_dir: Path,
        device_plugin_dir: Path,
        node_name: str | None,
        interval: float,
        **others: Any,
    ) -> Any:
        node = node_name or os.uname().nodename.lower()
        kubelet = KubeletDirectory(kubelet_dir, device_plugin_dir)
        return command(NodeConfig(runtime_dir or default_runtime_dir(), kubelet, node, interval), **others)

    return run
