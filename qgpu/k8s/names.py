"""Names that manifests, the API server and the kubelet know qgpu by, and its files in the kubelet's directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: The DRA driver; also the prefix of its attributes, taints and annotations.
DRIVER = "qgpu.io"
#: The opaque parameters of device classes and claims.
PARAMETERS_API, PARAMETERS_KIND = "qgpu.io/v1", "GrantParameters"
#: A node's annotation: the cards that get no new pods, see ``drain``.
DRAIN_ANNOTATION = "qgpu.io/drain"

KUBELET_DIR = Path("/var/lib/kubelet")
#: Every kubelet has its socket for device plugins here, even if its own directory is another (v1beta1/constants.go).
DEVICE_PLUGIN_DIR = KUBELET_DIR / "device-plugins"

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class KubeletDirectory:
    """The kubelet's directory, and the sockets in it."""

    root: Path
    #: Where device plugins and the kubelet's registration socket for them lie.
    device_plugins: Path = DEVICE_PLUGIN_DIR

    @property
    def registry(self) -> Path:
        """Where the kubelet looks for plugins."""
        return self.root / "plugins_registry"

    @property
    def registration_socket(self) -> Path:
        """Our registration socket."""
        return self.registry / f"{DRIVER}-reg.sock"

    @property
    def plugins(self) -> Path:
        """Where plugins keep their own sockets."""
        return self.root / "plugins"

    @property
    def dra_socket(self) -> Path:
        """The socket that the DRA driver serves."""
        return self.plugins / DRIVER / "dra.sock"

    @property
    def device_plugin_registration(self) -> Path:
        """The kubelet's registration socket for device plugins."""
        return self.device_plugins / "kubelet.sock"

    @property
    def pod_resources(self) -> Path:
        """The socket where the kubelet lists the devices of pods."""
        return self.root / "pod-resources" / "kubelet.sock"


def device_name(uuid: str) -> str | None:
    """Return a card's name in ResourceSlices, which lasts as long as its UUID; None for an unusual UUID."""
    return uuid.lower() if _UUID.fullmatch(uuid) else None


def card_uuid(device: str) -> str | None:
    """Return the UUID of the card with this name in ResourceSlices; None if no card can have the name."""
    uuid = "GPU-" + device.removeprefix("gpu-")
    return uuid if device_name(uuid) == device else None
