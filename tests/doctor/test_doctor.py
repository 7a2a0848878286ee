"""The doctor's judgement: what counts as enforced."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from qgpu.doctor.daemon import check_daemon, check_memory
from qgpu.doctor.module import absent
from qgpu.doctor.report import Verdict
from qgpu.doctor.selftest import beside_others, judge_count, judge_gate, judge_ratio, until_busy, weights
from qgpu.errors import ExitCode, QgpuError
from qgpu.ipc.control_socket import Client
from qgpu.model import Plan, Snapshot
from qgpu.policies.mechanism import by_weights
from qgpu.policies.registry import POLICIES, PolicyInfo
from tests.cli import programs


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((0.66, 0.33), Verdict.OK),
        ((0.63, 0.34), Verdict.OK),
        ((0.5, 0.5), Verdict.FAIL),
        ((0.9, 0.1), Verdict.FAIL),
        ((0.0, 0.0), Verdict.FAIL),
    ],
)
def test_a_ratio_is_held_within_a_tenth(shares: tuple[float, float], verdict: Verdict) -> None:
    assert judge_ratio("burst-share", (60, 30), shares).verdict is verdict


def test_policy_is_judged_by_the_weights_that_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def squared(snapshot: Snapshot) -> Plan:
        return by_weights(snapshot, [(pod.grant.cores or 1) ** 2 for pod in snapshot.pods])

    monkeypatch.setitem(POLICIES, "square-share", PolicyInfo(9, squared))
    given = {name: weights(name, (60, 30)) for name, info in POLICIES.items() if not info.caps}

    assert {name: one / other for name, (one, other) in given.items()} == {
        "best-effort": 1,
        "burst-share": 2,
        "square-share": 4,
    }


@pytest.mark.parametrize(("kernels", "verdict"), [([200, 100], Verdict.OK), ([100, 100], Verdict.FAIL)])
def test_gpu_time_must_agree_with_what_the_pods_count(kernels: list[int], verdict: Verdict) -> None:
    assert judge_count((0.66, 0.33), kernels).verdict is verdict


@pytest.mark.parametrize(
    ("shares", "verdict"), [((0.6, 0.3), Verdict.OK), ((0.64, 0.32), Verdict.OK), ((0.7, 0.3), Verdict.FAIL)]
)
def test_a_gate_that_leaks_is_found(shares: tuple[float, float], verdict: Verdict) -> None:
    assert judge_gate((60, 30), shares).verdict is verdict


@pytest.mark.parametrize(
    ("kernels", "verdict"), [([100, 50], Verdict.OK), ([100, 100], Verdict.WARN)], ids=["as asked", "otherwise"]
)
def test_beside_other_pods_wrong_shares_are_a_warning(kernels: list[int], verdict: Verdict) -> None:
    assert beside_others(judge_count((0.66, 0.33), kernels)).verdict is verdict


def test_module_not_built_for_running_kernel_is_found(tmp_path: Path) -> None:
    sources, modules = tmp_path / "src", tmp_path / "6.1.0-1-amd64"
    (modules / "updates").mkdir(parents=True)
    without = absent(sources, modules)
    (sources / "qgpu-0.1.0").mkdir(parents=True)
    unbuilt = absent(sources, modules)
    (modules / "updates" / "qgpu.ko.xz").touch()
    built = absent(sources, modules)

    assert [check.verdict for check in (without, unbuilt, built)] == [Verdict.OK, Verdict.WARN, Verdict.OK]
    assert "6.1.0-1-amd64" in unbuilt.remedy
    assert "modprobe qgpu" in built.found


GIB = 1 << 30


def overcommitted(**more: object) -> dict[str, Any]:
    """A daemon's status with a card of 141 GiB that is granted twice."""
    gpu = {"index": 0, "memory": 141 * GIB, "memory_overcommit": 2.0, "memory_shortage": 0, "memory_stuck": {}}
    return {"driver": "580.159.04", "gpus": [gpu | more]}


def pod(name: str, pod_class: str, gib: int, *, suspended: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "state": "suspended" if suspended else "running",
        "suspended_memory": {"0": suspended * GIB} if suspended else {},
        "grants": [{"gpu": 0, "class": pod_class, "memory": gib * GIB}],
    }


PODS = [pod("web", "online", 20), pod("train", "offline", 120, suspended=100), pod("other", "offline", 80)]
GRANTED = "141 GiB, granted 20 GiB to online and 200 GiB to offline pods; 100 GiB in host memory"


def test_overcommitted_memory_is_shown_by_class() -> None:
    (check,) = check_memory(overcommitted(), PODS)

    assert (check.name, check.verdict, check.found) == ("memory of pGPU 0", Verdict.OK, GRANTED)
    assert not list(check_memory(overcommitted(memory_overcommit=1.0), PODS))


def test_memory_still_to_be_made_free_is_a_warning() -> None:
    (check,) = check_memory(overcommitted(memory_shortage=10 * GIB), PODS)

    assert (check.verdict, check.found) == (Verdict.WARN, f"{GRANTED}; 10 GiB still to be made free")
    assert "move, suspend or end one" in check.remedy


def test_pods_that_cannot_be_moved_off_are_a_warning() -> None:
    memory, stays = check_memory(overcommitted(memory_stuck={"other": "memory is shared"}), PODS)

    assert memory.verdict is Verdict.OK
    assert (stays.name, stays.verdict) == ("pods that stay on pGPU 0", Verdict.WARN)
    assert (stays.found, bool(stays.remedy)) == ("other: memory is shared", True)


@pytest.mark.parametrize(
    ("driver", "verdicts"),
    [("565.57.01", [Verdict.WARN, Verdict.OK]), ("570.86.15", [Verdict.OK]), (None, [Verdict.OK])],
)
def test_overcommit_on_an_old_driver_is_a_warning(driver: str | None, verdicts: list[Verdict]) -> None:
    checks = list(check_memory(overcommitted() | {"driver": driver}, PODS))

    assert [check.verdict for check in checks] == verdicts
    if len(checks) > 1:
        assert "on for pGPU 0, but driver 565.57.01 cannot suspend pods" in checks[0].found
        assert "install driver branch 570 or newer" in checks[0].remedy


def test_a_running_daemon_tells_its_overcommitted_memory(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run", "--state-dir", str(tmp_path / "state")) as daemon:
        assert daemon.ctl("gpu", "policy", "set", "0", "--memory-overcommit", "2.0").returncode == 0
        checks = check_daemon(daemon.runtime_dir, programs.TIMEOUT_S)

    assert [check.name for check in checks] == ["runtime directory", "daemon", "state directory", "memory of pGPU 0"]
    assert str(tmp_path / "state") in checks[2].found
    assert checks[-1].found.startswith("141 GiB, granted 0 B to online and 0 B to offline pods")


def test_a_self_test_without_permission_ends_with_its_code(tmp_path: Path) -> None:
    load = subprocess.Popen(["sh", "-c", f"exit {ExitCode.NO_PERMISSION}"])
    load.wait()
    with (
        programs.daemon(tmp_path) as daemon,
        Client(daemon.runtime_dir) as client,
        pytest.raises(QgpuError, match="ended early") as raised,
    ):
        until_busy(client, 0, [load])

    assert raised.value.code == ExitCode.NO_PERMISSION
