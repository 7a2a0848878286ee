"""Stand-ins for other products that advertise a node's cards: a socket where theirs is, at which somebody listens."""

from __future__ import annotations

import socket
from pathlib import Path

#: Where each product listens, below the kubelet's folder.
PLACES = {
    "plugins_registry/gpu.nvidia.com-reg.sock": "NVIDIA's DRA driver",
    "plugins/gpu.nvidia.com/dra.sock": "NVIDIA's DRA driver",
    "plugins_registry/hami-core-gpu.project-hami.io-reg.sock": "HAMi's DRA driver",
    "plugins/hami-core-gpu.project-hami.io/dra.sock": "HAMi's DRA driver",
    "device-plugins/nvidia-gpu.sock": "NVIDIA's device plugin, or HAMi's,",
    "device-plugins/nvidiaGPU-1700000000.sock": "NVIDIA's device plugin, or HAMi's,",
    "device-plugins/vcore.sock": "Tencent's GPU manager",
    "device-plugins/vmemory.sock": "Tencent's GPU manager",
    "device-plugins/aliyungpushare.sock": "Alibaba's GPU sharing",
}


def listener(path: Path) -> socket.socket:
    """Return a socket at which somebody listens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made
