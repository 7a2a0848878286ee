"""Other products that advertise a node's cards are found by their sockets in the kubelet's folders."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.k8s import conflicts
from qgpu.k8s.names import KubeletDirectory
from tests.k8s.rivals import PLACES, listener


@pytest.fixture
def kubelet() -> Iterator[KubeletDirectory]:
    """A kubelet's folders, with qgpu's own sockets in them."""
    with tempfile.TemporaryDirectory(prefix="qgpu-k8s.") as name:  # short, because sockets lie in it
        found = KubeletDirectory(Path(name), Path(name) / "device-plugins")
        ours = found.registration_socket, found.dra_socket, found.device_plugins / "qgpu-qgpu.io-cores.sock"
        with listener(ours[0]), listener(ours[1]), listener(ours[2]):
            yield found


def test_node_without_rivals_has_no_conflict(kubelet: KubeletDirectory) -> None:
    with listener(kubelet.device_plugin_registration), listener(kubelet.registry / "csi.example.com-reg.sock"):
        assert conflicts.find(kubelet) == ""


@pytest.mark.parametrize("place", PLACES)
def test_rival_is_found_by_its_socket_and_named(kubelet: KubeletDirectory, place: str) -> None:
    path = kubelet.root / place
    with listener(path):
        found = conflicts.find(kubelet)

    assert found.startswith(f"{path}: {PLACES[place]} advertises this node's cards too; remove it from this node")
    assert "\n" not in found


@pytest.mark.parametrize("place", PLACES)
def test_socket_without_a_listener_is_no_rival(kubelet: KubeletDirectory, place: str) -> None:
    listener(kubelet.root / place).close()

    assert conflicts.find(kubelet) == ""


@pytest.mark.parametrize("place", PLACES)
def test_plain_file_of_a_rivals_name_is_no_rival(kubelet: KubeletDirectory, place: str) -> None:
    path = kubelet.root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()

    assert conflicts.find(kubelet) == ""
