"""What a container's cgroup says of it, whatever its image says."""

from __future__ import annotations

import pytest

from qgpu.daemon import container_notes

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    ("uid", "noted"), [("x" * 70_000, ""), ("x" * 64, ""), ("a\nb", ""), ("6f1c-2e", "6f1c-2e"), ("x" * 63, "x" * 63)]
)
def test_no_uid_of_an_image_keeps_a_containers_note_away(rig, uid, noted):
    web = rig.container(uid="", annotations={"io.kubernetes.pod.uid": uid}, env=["QGPU_GPU_0="])
    name = rig.bind(web)
    found = container_notes.read(rig.requests.pods.named(name))

    assert found is not None
    assert (found.container, found.pod_uid, found.names) == (web.id, noted, web.names)
    assert rig.bind(web) == name
