"""The self-test: runs two short pods at 2:1 on a pGPU and checks their measured GPU time.

It uses the running daemon, or starts its own. It compares what the daemon's plane measures with the pods' own
counters. It changes no setting: beside other pods it judges the policy in force; on a pGPU without other pods it puts
temporary policies in force, which end with its connection. Its pods end with it, however it ends. Beside other pods, a
wrong share proves nothing, so it is only a warning.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qgpu import errors
from qgpu.config import GpuSettings
from qgpu.doctor.report import Check, Verdict
from qgpu.errors import DaemonUnreachableError, QgpuError, RefusedError, TimedOutError, no_pgpu
from qgpu.ipc.control_socket import Client
from qgpu.linux.interpreter import python
from qgpu.linux.parent_death import terminated_with_parent
from qgpu.model import Grant, Pod, Snapshot, Tsg
from qgpu.policies.registry import POLICIES

#: The largest relative error of a measured share in a test this short.
TOLERANCE = 0.10

_START_S = 15.0
_SETTLE_S = 0.6
_MEASURE_S, _LONGER_S = 1.2, 5.0
_PODS = ("self-test-a", "self-test-b")
#: The memory limit of its pods, where every pod needs a limit.
_LIMIT = "1GiB"
#: A kernel of about 1 ms on an H100. The loads do not calibrate: both at once would get kernels of different lengths.
_ITERATIONS = 12_500


def self_test(runtime_dir: Path, gpu: int, timeout_s: float, say: Callable[[str], None]) -> list[Check]:
    """Run the self-test on one pGPU; ``say`` announces it. Raises RefusedError if too little is left to grant."""
    with _ending_in_order(), _daemon(runtime_dir, timeout_s) as directory, Client(directory, timeout_s) as client:
        policy = _gpu(client, gpu)["policy"]
        quotas, tenants = _quotas(client, gpu), _tenants(client, gpu)
        # before the announcement, because it fails without permission
        with suppress(RefusedError) if tenants else nullcontext():
            _try(client, gpu, "burst-share")
            tenants = []  # those that there were have gone
        say(_announcement(gpu, policy, quotas, tenants))
        limit = ("--memory", _LIMIT) if _gpu(client, gpu)["memory_overcommit"] > 1 else ()
        with _loads(directory, gpu, quotas, limit) as loads:
            until_busy(client, gpu, loads)
            time.sleep(_SETTLE_S)
            before, from_s = _usage(client, gpu), time.time()
            checks = [_check(client, gpu, policy if tenants else "burst-share", quotas)]
            if not tenants:
                checks.append(_test_gate(client, gpu, quotas))
            after, to_s = _usage(client, gpu), time.time()
        kernels = [_kernels(load, from_s, to_s) for load in loads]
    checks.append(judge_count(_divided(before, after), kernels))
    return [beside_others(check) for check in checks] if tenants else checks


def _announcement(gpu: int, policy: str, quotas: tuple[int, int], tenants: Sequence[str]) -> str:
    """Return the line that announces what the test does and disturbs."""
    what = f"self-test: two pods with {quotas[0]} and {quotas[1]} % run on pGPU {gpu} for some seconds"
    if not tenants:
        return f"{what}; no other pod is on it"
    return f"{what}; its policy stays {policy}; meanwhile less idle time is lent to {', '.join(tenants)}"


def _try(client: Client, gpu: int, policy: str) -> None:
    """Put a temporary policy in force; it ends with the connection, or when another pod comes."""
    client.call("gpu.set_temporarily", gpu=gpu, policy=policy, pods=list(_PODS))


def _test_gate(client: Client, gpu: int, quotas: tuple[int, int]) -> Check:
    came = "not tested: another pod came meanwhile"
    try:
        _try(client, gpu, "fixed-share")
    except RefusedError:
        return Check("gate", Verdict.WARN, came)
    check = _check(client, gpu, "fixed-share", quotas)
    return check if set(_tenants(client, gpu)) <= set(_PODS) else Check("gate", Verdict.WARN, came)


def _check(client: Client, gpu: int, policy: str, quotas: tuple[int, int]) -> Check:
    """Measure and judge what a policy promises: quotas, or the ratio of its weights."""
    if POLICIES[policy].caps:
        return _measured(client, gpu, partial(judge_gate, quotas))
    return _measured(client, gpu, partial(judge_ratio, policy, weights(policy, quotas)))


def weights(policy: str, quotas: tuple[int, int]) -> tuple[int, int]:
    """Return the weights that a policy gives to the two pods."""
    pods = (Pod(name, Grant(cores=quota), (Tsg("one", busy=True),)) for name, quota in zip(_PODS, quotas, strict=True))
    plan = POLICIES[policy].plan(Snapshot(0, GpuSettings().period_ns, tuple(pods)))
    one, other = (part.weight for part in plan.pods)
    return one, other


def _measured(client: Client, gpu: int, judge: Callable[[tuple[float, float]], Check]) -> Check:
    """Judge a short measurement, and a longer one if the short one fails.

    A busy host disturbs a longer measurement less. Shares that are not enforced fail both.
    """
    check = judge(_shares(client, gpu, _MEASURE_S))
    return check if check.verdict is Verdict.OK else judge(_shares(client, gpu, _LONGER_S))


def judge_ratio(policy: str, weights: tuple[int, int], shares: tuple[float, float]) -> Check:
    """Compare the ratio of measured shares with that of the weights."""
    asked, got = weights[0] / weights[1], shares[0] / max(shares[1], 1e-9)
    found = f"asked {asked:.2f}:1, got {got:.2f}:1 ({shares[0]:.1%} and {shares[1]:.1%} of true GPU time)"
    return _judged(policy.replace("-", " "), abs(got / asked - 1) <= TOLERANCE, found)


def judge_count(shares: tuple[float, float], kernels: list[int]) -> Check:
    """Compare GPU time with the kernels that the loads counted themselves."""
    by_time, by_count = shares[0] / max(shares[1], 1e-9), kernels[0] / max(kernels[1], 1)
    found = f"{by_time:.2f}:1 by GPU time, {by_count:.2f}:1 by kernels finished"
    return _judged("GPU time", abs(by_count / max(by_time, 1e-9) - 1) <= TOLERANCE, found)


def judge_gate(quotas: tuple[int, int], shares: tuple[float, float]) -> Check:
    """Compare shares under Fixed Share, which leaves time idle, with the quotas."""
    pairs = [(quota / 100, share) for quota, share in zip(quotas, shares, strict=True)]
    found = "fixed share: " + ", ".join(f"asked {want:.0%}, got {got:.1%}" for want, got in pairs)
    return _judged("gate", all(abs(got / want - 1) <= TOLERANCE for want, got in pairs), found)


def _judged(name: str, held: bool, found: str) -> Check:
    remedy = (
        "" if held else "shares are not enforced; is the card shared by processes outside qgpu? see the daemon's log"
    )
    return Check(name, Verdict.OK if held else Verdict.FAIL, found, remedy)


def beside_others(check: Check) -> Check:
    """Turn a failure beside other pods into a warning: online pods come first, and a short test sees few turns."""
    remedy = "not proven beside other pods; test again, or on a pGPU without pods"
    return replace(check, verdict=Verdict.WARN, remedy=remedy) if check.verdict is Verdict.FAIL else check


@contextmanager
def _daemon(runtime_dir: Path, timeout_s: float) -> Iterator[Path]:
    """Yield the runtime directory of the running daemon, or of one of our own."""
    try:
        Client(runtime_dir, timeout_s).close()
    except DaemonUnreachableError:
        with tempfile.TemporaryDirectory(prefix="qgpu-self-test-") as own:
            log = Path(own) / "log"
            with log.open("wb") as said:
                process = _start("qgpu.daemon.main", "--runtime-dir", own, stderr=said)
            try:
                _until(lambda: (Path(own) / "qgpud.sock").exists() or process.poll() is not None, "its own qgpud")
                if process.poll() is not None:
                    why = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise QgpuError(f"self-test: its own qgpud did not start; its error: {why}")
                yield Path(own)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()
        return
    yield runtime_dir


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """End the test's pods and daemon also when a signal ends the test; after SIGKILL the kernel ends them."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _loads(
    directory: Path, gpu: int, quotas: tuple[int, int], limit: tuple[str, ...]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a flood in each of two pods."""
    loads = [
        _start(
            "qgpu.cli.main",
            *("--runtime-dir", str(directory), "run", "--gpu", str(gpu), "--name", name, *limit),
            *("--cores", str(quota), "--"),
            *python("-m", "qgpu.load.main", "--kernel", "1ms", "--iterations", str(_ITERATIONS)),
            *("--duration", "60s"),
            stdout=subprocess.PIPE,
        )
        for name, quota in zip(_PODS, quotas, strict=True)
    ]
    try:
        yield loads
    finally:
        for load in loads:
            load.send_signal(signal.SIGTERM)
        for load in loads:
            load.wait()


def _kernels(load: subprocess.Popen[bytes], from_s: float, to_s: float) -> int:
    """Return how many kernels an ended load finished between two wall-clock times, as it recorded."""
    assert load.stdout is not None
    with load.stdout as stdout:
        result = json.loads(stdout.read())
    began_s = result["started_ns"] / 1e9
    return sum(kernels for at_s, kernels in result["windows"] if from_s <= began_s + at_s <= to_s)


def _start(module: str, *arguments: str, **redirections: Any) -> subprocess.Popen[bytes]:
    command = [*terminated_with_parent(), *python("-m", module, *arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **redirections)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimedOutError(f"self-test: {what} did not start within {_START_S:g} s")
        time.sleep(0.05)


def _gpu(client: Client, index: int) -> dict[str, Any]:
    gpus = {gpu["index"]: gpu for gpu in client.call("gpu.list")["gpus"]}
    if index not in gpus:
        raise no_pgpu(index, gpus)
    return dict(gpus[index])


def _quotas(client: Client, gpu: int) -> tuple[int, int]:
    """Return two quotas at 2:1 that still fit, at most 60 and 30 %."""
    grants = [grant for pod in client.call("pod.list")["pods"] for grant in pod["grants"] if grant["gpu"] == gpu]
    part = min(30, (100 - sum(grant["cores"] or 0 for grant in grants)) // 3)
    if part < 1:
        raise RefusedError(f"self-test: less than 3 % of pGPU {gpu} is left to grant; try another --gpu")
    return 2 * part, part


def _tenants(client: Client, gpu: int) -> list[str]:
    """Return the pods on the pGPU."""
    pods = client.call("pod.list")["pods"]
    return [pod["name"] for pod in pods if any(grant["gpu"] == gpu for grant in pod["grants"])]


def _usage(client: Client, gpu: int) -> list[dict[str, Any]]:
    """Return the usage of the test's pods that exist, in order."""
    pods = {pod["name"]: pod for pod in client.call("pod.list")["pods"]}
    return [usage for name in _PODS if name in pods for usage in pods[name]["usage"] if usage["gpu"] == gpu]


def until_busy(client: Client, gpu: int, loads: list[subprocess.Popen[bytes]]) -> None:
    """Wait until both pods of the test are busy. Raises the QgpuError that a load ended with."""

    def busy() -> bool:
        codes = [code for load in loads if (code := load.poll()) is not None]
        if codes:
            raise errors.from_code(codes[0], "self-test: its load ended early; see its message above")
        usages = _usage(client, gpu)
        return len(usages) == len(_PODS) and all(usage["busy"] for usage in usages)

    _until(busy, "its load")


def _shares(client: Client, gpu: int, seconds: float) -> tuple[float, float]:
    """Wait until the last change of settings takes effect, then measure both pods' shares of the pGPU's time."""
    time.sleep(_SETTLE_S)
    before = _usage(client, gpu)
    time.sleep(seconds)
    return _divided(before, _usage(client, gpu))


def _divided(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return both pods' shares of the time between two readings of their usage."""
    first, second = (
        (now["used_ns"] - then["used_ns"]) / max(1, now["now_ns"] - then["now_ns"])
        for then, now in zip(before, after, strict=True)
    )
    return first, second
