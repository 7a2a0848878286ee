"""The doctor's judgement: what counts as enforced."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qgpu.doctor.module import absent
from qgpu.doctor.report import Verdict
from qgpu.doctor.selftest import judge_count, judge_gate, judge_ratio, until_busy, weights
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
