"""A pod's limit is halved while the pod is full, and restored. What it frees meanwhile it must not get again."""

from __future__ import annotations

import time

from harness import tail

from attacks.judge import Row
from attacks.world import World, end_attacker, now, start_attacker

_NAME = "attacker"
RESIZED = "limit halved while full, and restored"
_FULL, _LESS = "holds 4", "holds 3"
_READY_S = 10.0


def resized(world: World) -> Row:
    """Run a program that frees a quarter of its memory and takes it again, over and over, while its limit changes."""
    bench, quota = world.bench, world.quota
    report, log = bench.directory / "report", bench.directory / "attacker.log"
    report.unlink(missing_ok=True)
    base = world.card_used()
    command = [str(bench.directory / "raw"), "hungry", str(report), str(quota)]
    process = start_attacker(world, _NAME, ["--cores", "40", "--memory", f"{quota >> 20}MiB"], command, log)

    def says(what: str) -> bool:
        until = now() + _READY_S * bench.timeout_factor
        while now() < until and process.poll() is None:
            if report.exists() and what in report.read_text():
                return True
            time.sleep(0.01)
        return False

    def over(limit: int) -> int:
        return max(0, max(world.card_used() for _ in range(10)) - base - limit)

    told = [says(_FULL)]
    bench.ask("pod.set", name=_NAME, memory=quota // 2)
    told += [says(_LESS)]
    time.sleep(0.3)
    told += [_LESS in report.read_text() if report.exists() else False]
    lowered = over(3 * quota // 4)
    bench.ask("pod.set", name=_NAME, memory=quota)
    told += [says(_FULL)]
    restored = over(quota)
    said = report.read_text().strip() if report.exists() else f"no report: {tail(log, 2)}"
    end_attacker(world, _NAME, process)
    worst = max(lowered, restored)
    return Row("raw", RESIZED, bytes_over_quota=worst, said=said, passed=all(told) and worst == 0)
