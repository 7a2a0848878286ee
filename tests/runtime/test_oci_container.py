"""A container as its runtime describes it: what it can reach is what it has, and nonsense is refused."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.linux import cgroup
from qgpu.runtime.oci_container import Container, described

NODES = {0: {(195, 3): "/dev/nvidia3"}, 1: {(195, 0): "/dev/nvidia0"}}
CTL = (195, 255)

MESSAGE = {
    "id": "web",
    "pid": 7,
    "annotations": {"qgpu.io/cores": "40"},
    "env": ["PATH=/bin", "EMPTY=", "bare", "X=a=b"],
    "devices": [[195, 3], [1, 3]],
    "seccomp": None,
    "rules": [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 3, "access": "rw"},
    ],
}


def test_a_description_is_read_whole():
    read = described(MESSAGE)

    assert read.environment == {"PATH": "/bin", "EMPTY": "", "X": "a=b"}
    assert read.gpus(NODES) == [0]
    assert read.wanted().grant.cores == 40


@pytest.mark.parametrize("key", sorted(MESSAGE))
@pytest.mark.parametrize("value", ["x", 7, {"a": 1}, [["x", "y"]]])
def test_a_description_that_is_none_is_refused_or_harmless(key, value):
    with contextlib.suppress(InvalidValueError):
        assert isinstance(described(MESSAGE | {key: value}), Container)


@pytest.mark.parametrize("key", sorted(MESSAGE))
def test_a_description_with_a_part_missing_is_refused(key):
    with pytest.raises(InvalidValueError):
        described({name: value for name, value in MESSAGE.items() if name != key})


@pytest.mark.parametrize("said", [{}, {"QGPU_GPU_0": ""}, {"QGPU_GPU_0": "GPU-aa", "QGPU_GPU_1": "GPU-bb"}])
def test_container_gets_gpus_of_its_nodes_whatever_env_says(said):
    assert Container("web", 7, environment=said, devices=[(195, 0), CTL]).gpus(NODES) == [1]


def test_an_image_that_names_a_gpu_has_none_by_that():
    with pytest.raises(RefusedError, match="no pGPU"):
        Container("web", 7, environment={"QGPU_GPU_0": ""}, devices=[CTL]).gpus(NODES)


def test_a_simulated_gpu_is_named_by_its_variable():
    assert Container("web", 7, environment={"QGPU_GPU_0": ""}).gpus({0: {}, 1: {}}) == [0]


@pytest.mark.parametrize("minor", [{}, {"minor": 0}, {"minor": -1}])
def test_a_rule_that_opens_a_card_without_a_grant_is_refused(minor):
    rules = [{"allow": False}, {"allow": True, "type": "c", "major": 195, "access": "rw", **minor}]
    with pytest.raises(RefusedError, match="lets it open /dev/nvidia0"):
        Container("web", 7, devices=[(195, 3), CTL], rules=rules).gpus(NODES)

    assert Container("web", 7, devices=[(195, 3), (195, 0), CTL], rules=rules).gpus(NODES) == [0, 1]
    assert Container("web", 7, devices=[(195, 0), CTL], rules=rules[:1]).gpus(NODES) == [1]


def test_a_restored_container_is_refused_except_on_the_simulator():
    restored, new = described(MESSAGE | {"restored": True}), described(MESSAGE | {"restored": False})
    with pytest.raises(RefusedError, match="restored from a checkpoint"):
        restored.check_new(NODES)

    restored.check_new({0: {}})
    new.check_new(NODES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run.oci.delegate-cgroup", "inner"),
        ("run.oci.delegate-cgroup", "../victim"),
        ("run.oci.systemd.subgroup", "../victim"),
        ("run.oci.handler", "krun"),
        ("run.oci.pidfd_receiver", "/run/x.sock"),
        ("run.oci.seccomp.receiver", "/tmp/x"),
        ("run.oci.seccomp.plugins", "/tmp/x"),
        ("run.oci.seccomp_bpf_data", "BgAAAAAA/38="),
        ("run.oci.of_a_later_crun", ""),
    ],
)
def test_annotation_that_may_move_a_container_is_refused(name, value):
    with pytest.raises(RefusedError, match=f"annotation {name} "):
        Container("web", 7, {name: value}).check_annotations()


@pytest.mark.parametrize(
    "annotations",
    [
        {"run.oci.hooks.stderr": "/run/said", "run.oci.hooks.stdout": "/run/said"},
        {"run.oci.keep_original_groups": "1", "run.oci.mount_context_type": "rootcontext"},
        {"run.oci.seccomp_fail_unknown_syscall": "1"},
        {"run.oci.systemd.subgroup": ""},
        {"org.opencontainers.image.title": "run.oci.handler", "qgpu.io/cores": "40"},
    ],
)
def test_annotations_that_change_no_cgroup_or_filter_are_fine(annotations):
    Container("web", 7, annotations).check_annotations()


@pytest.fixture
def host(monkeypatch):
    """Let this be a host with version 2 alone, or one with version 1 beside it; and with nsdelegate or without."""

    def be(hybrid=False, bounds=True):
        at = Path("/sys/fs/cgroup/unified" if hybrid else "/sys/fs/cgroup")
        options = "rw,nsdelegate" if bounds else "rw"
        monkeypatch.setattr(cgroup, "_mountinfo", lambda: f"30 23 0:26 / {at} rw - cgroup2 cgroup2 {options}\n")

    return be


def with_mount(kind, source, *namespaces):
    return described(MESSAGE | {"namespaces": ["pid", *namespaces], "mounts": [["proc", "proc"], [kind, source]]})


@pytest.mark.parametrize(
    ("hybrid", "kind", "source"),
    [
        (False, "cgroup", "/bundle/cgroup"),
        (False, "cgroup2", "/bundle/cgroup"),
        (False, "bind", "/sys/fs/cgroup/system.slice"),
        (False, "bind", "/sys"),
        (False, "", "/"),
        (True, "cgroup2", "/bundle/cgroup"),
        (True, "bind", "/sys/fs/cgroup/unified"),
        (True, "bind", "/sys/fs/cgroup"),
    ],
)
def test_cgroup_mount_without_own_namespace_is_refused(host, hybrid, kind, source):
    host(hybrid)
    with pytest.raises(RefusedError, match="--cgroupns=private"):
        with_mount(kind, source).check_mounts()

    with_mount(kind, source, "cgroup").check_mounts()


@pytest.mark.parametrize(
    ("hybrid", "kind", "source"),
    [
        (True, "cgroup", "/bundle/cgroup"),
        (True, "bind", "/sys/fs/cgroup/systemd"),
        (False, "bind", "/sys/fs/cgroup-data"),
        (False, "sysfs", "/bundle/sysfs"),
        (False, "bind", "/srv"),
    ],
)
def test_mounts_that_show_no_tree_need_no_namespace(host, hybrid, kind, source):
    host(hybrid)
    with_mount(kind, source).check_mounts()
    described(MESSAGE).check_mounts()


@pytest.mark.parametrize("namespaces", [(), ("cgroup",)])
def test_bind_of_a_tree_that_bounds_no_namespace_is_refused(host, namespaces):
    host(bounds=False)
    with pytest.raises(RefusedError, match=r"--cgroupns=private|nsdelegate"):
        with_mount("bind", "/sys", *namespaces).check_mounts()

    with_mount("cgroup", "/bundle/cgroup", "cgroup").check_mounts()


@pytest.mark.parametrize("key", ["namespaces", "mounts"])
@pytest.mark.parametrize("value", ["x", 7, {"a": 1}, [["x"]], [7]])
def test_mounts_that_are_none_are_refused_or_harmless(key, value):
    with contextlib.suppress(InvalidValueError):
        assert isinstance(described(MESSAGE | {key: value}), Container)


def test_a_card_that_qgpu_does_not_share_is_refused():
    with pytest.raises(RefusedError, match="/dev/nvidia5 is not shared"):
        Container("web", 7, devices=[(195, 5)]).gpus(NODES)


#: Two MIG instances of the card with minor 3.
INSTANCES = {
    102: {(195, 3): "/dev/nvidia3", (237, 21): "", (237, 22): ""},
    111: {(195, 3): "/dev/nvidia3", (237, 102): "", (237, 103): ""},
}


def test_container_gets_instance_of_its_capability_files():
    assert Container("web", 7, devices=[(195, 3), (237, 21), (237, 22), CTL]).gpus(INSTANCES) == [102]


@pytest.mark.parametrize("files", [[], [21], [21, 22, 102], [21, 22, 5], [22, 102]])
def test_container_with_other_capability_files_is_refused(files):
    with pytest.raises(RefusedError, match="is not shared by qgpu"):
        Container("web", 7, devices=[(195, 3), *((237, minor) for minor in files), CTL]).gpus(INSTANCES)


def test_rule_that_opens_another_instance_is_refused():
    rules = [{"allow": False}, {"allow": True, "type": "c", "major": 237, "access": "r"}]
    with pytest.raises(RefusedError, match=r"lets it open /dev/nvidia-caps/nvidia-cap10[23]"):
        Container("web", 7, devices=[(195, 3), (237, 21), (237, 22)], rules=rules).gpus(INSTANCES)


@pytest.mark.parametrize(("device", "name"), [((226, 128), "/dev/dri"), ((195, 254), "/dev/nvidia-modeset")])
def test_uncounted_video_memory_devices_conflict_with_a_limit(device, name):
    limited = Container("web", 7, annotations={"qgpu.io/memory": "4GiB"}, devices=[CTL, device])
    with pytest.raises(RefusedError, match=f"{name} makes video memory"):
        limited.check_devices()

    Container("web", 7, devices=[CTL, device]).check_devices()
    Container("web", 7, annotations={"qgpu.io/memory": "4GiB"}, devices=[CTL]).check_devices()


DENY = {"allow": False, "access": "rwm"}


def limited(*rules):
    return Container("web", 7, annotations={"qgpu.io/memory": "4GiB"}, devices=[CTL], rules=rules)


@pytest.mark.parametrize(
    "rules",
    [
        [],
        [{"allow": True, "access": "rwm"}],
        [DENY, {"allow": True, "type": "a", "access": "rw"}],
        [DENY, {"allow": True, "type": "c", "access": "rwm"}],
        [DENY, {"allow": True, "type": "c", "major": -1, "minor": -1, "access": "rwm"}],
        [DENY, {"allow": True, "type": "c", "major": 226, "access": "rwm"}],
        [DENY, {"allow": True, "type": "c", "major": 226, "minor": 128, "access": "r"}],
        [DENY, {"allow": True, "type": "c", "major": 195, "access": "rw"}],
        [DENY, {"allow": True, "type": "c", "major": 195, "minor": 254}],
        [{"allow": True, "access": "rwm"}, {"allow": False, "type": "c", "major": 226, "minor": 0, "access": "rwm"}],
        [{"allow": True, "access": "rwm"}, {"allow": False, "type": "b", "access": "rwm"}],
        [{"allow": True, "access": "rwm"}, {"allow": False, "access": "w"}],
    ],
)
def test_device_rule_beyond_limits_conflicts_with_a_limit(rules):
    with pytest.raises(RefusedError, match="makes video memory that no limit covers"):
        limited(*rules).check_devices()
    assert Container("web", 7, devices=[CTL], rules=rules).beyond_limits()


@pytest.mark.parametrize(
    "rules",
    [
        [DENY],
        [DENY, {"allow": True, "type": "c", "access": "m"}],
        [DENY, {"allow": True, "type": "b", "access": "rwm"}],
        [DENY, {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rwm"}],
        [DENY, {"allow": True, "type": "c", "major": 1, "access": "rwm"}],
        [{"allow": True, "access": "rwm"}, DENY],
        [
            {"allow": True, "access": "rwm"},
            {"allow": False, "type": "c", "major": 226, "access": "rwm"},
            {"allow": False, "type": "c", "major": 195, "minor": 254, "access": "rw"},
        ],
    ],
)
def test_rules_that_open_nothing_else_go_with_a_limit(rules):
    limited(*rules).check_devices()


def test_a_container_without_a_card_is_refused():
    with pytest.raises(RefusedError, match="no pGPU"):
        Container("web", 7, devices=[CTL, (1, 3)]).gpus(NODES)


def test_cri_o_labels_count():
    read = Container("web", 7, annotations={"io.kubernetes.cri-o.Labels": '{"qgpu.io/cores": "40"}'})

    assert read.wanted().grant.cores == 40


@pytest.mark.parametrize("labels", ["{", "5", '["qgpu.io/cores"]'])
def test_labels_that_are_no_table_are_refused(labels):
    with pytest.raises(InvalidValueError, match=r"cri-o\.Labels"):
        Container("web", 7, annotations={"io.kubernetes.cri-o.Labels": labels}).wanted()


def test_a_container_in_its_starters_cgroup_is_refused():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(RefusedError, match="no cgroup of its own"):
                Container("web", process.pid).cgroup()
        finally:
            process.kill()


def test_a_container_that_is_gone_is_refused():
    with pytest.raises(RefusedError, match="process"):
        Container("web", 2**22 + 1).cgroup()


def named(cri="", cri_o=""):
    keys = (
        ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name"),
        ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"),
    )
    said = (zip(of, ("shop", name, "main"), strict=True) for of, name in zip(keys, (cri, cri_o), strict=True) if name)
    return Container("0123456789abcdef", 7, dict(pair for pairs in said for pair in pairs))


@pytest.mark.parametrize("name", ["\x1b]0;hello\x07" + 80 * "x", "cart\n", "Cart", "-cart", "cart" * 80])
def test_what_an_image_says_in_place_of_a_name_is_none(name):
    """Names are printed on terminals, and shown with metrics."""
    assert (named(cri=name).kubernetes_names(), named(cri=name).pod) == ((), "0123456789ab")
    assert named(cri=name, cri_o="cart").kubernetes_names() == ("shop", "cart", "main")


def test_names_that_contradict_each_other_are_refused():
    """A runtime writes its own annotations, and passes on what an image says in another one's."""
    assert named("cart", "cart").pod == "shop.cart.main"
    with pytest.raises(RefusedError, match=r"cri.sandbox-name and io.kubernetes.pod.name differ"):
        named("cart", "till").kubernetes_names()
