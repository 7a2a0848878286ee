"""How soon a pod whose gate was closed runs again when what closed it is killed, stopped, or started anew.

The neighbour alone under Fixed Share with a small quota and a long period: nearly always its gate is closed. What is
told is the time from the signal to its first step, and to the start of half a second at full rate. What hangs without
being stopped is frozen in a cgroup of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

import psutil
from harness import Bench, BenchError

from attacks.judge import Row, Watch
from attacks.world import World, now, policy
from qgpu import cgroup
from tests.cli.manager import Manager

_SEEN_S = 3.5
_PERIOD_MS = 2000
#: Nobody is left then who could do anything but the service manager (docs/decisions/0015).
_BOTH = "daemon and guardian killed, daemon restarted"
_CORES = 5


def _processes(bench: Bench, what: str) -> list[psutil.Process]:
    found = []
    for process in bench.processes():
        with suppress(psutil.Error):
            if any(what in word for word in process.cmdline()):
                found.append(process)
    return found


def daemons(bench: Bench) -> list[psutil.Process]:
    """Find the daemon."""
    return [p for p in _processes(bench, "--plane") if p not in _processes(bench, "qgpu.guardian")]


def reserves(bench: Bench) -> list[psutil.Process]:
    """Find what would be the next guardian."""
    return [process for process in _processes(bench, "qgpu.guardian") if process.name() == "qgpu-reserve"]


def guardians(bench: Bench) -> list[psutil.Process]:
    """Find what the daemon started to stand by the pods, but for the one in reserve: none on the module's plane."""
    return [process for process in _processes(bench, "qgpu.guardian") if process.name() == "qgpu-guardian"]


def supervisors(bench: Bench) -> list[psutil.Process]:
    """Find the ``qgpuctl run`` that started the neighbour."""
    return [process for process in _processes(bench, "qgpu.cli.main") if "neighbour" in process.cmdline()]


def _signal(number: int, *finders: Callable[[Bench], list[psutil.Process]]) -> Callable[[Bench], None]:
    def act(bench: Bench) -> None:
        for process in [found for finder in finders for found in finder(bench)]:
            with suppress(psutil.Error):
                os.kill(process.pid, number)

    return act


def _freeze(find: Callable[[Bench], list[psutil.Process]]) -> Callable[[Bench], None]:
    """Let processes hang without being stopped: in a frozen cgroup (v2) nothing runs, and nothing says so."""

    def act(bench: Bench) -> None:
        group = cgroup.mount() / "qgpu-hangs"
        group.mkdir(exist_ok=True)
        for process in find(bench):
            (group / "cgroup.procs").write_text(str(process.pid))
        (group / "cgroup.freeze").write_text("1")

    return act


def _thaw() -> None:
    """Let what is frozen go on, if anything is."""
    with suppress(OSError):
        (cgroup.mount() / "qgpu-hangs" / "cgroup.freeze").write_text("0")


@contextmanager
def _service(bench: Bench) -> Iterator[Callable[[Bench], None]]:
    """Let the daemon be a service: its manager keeps its descriptors, and starts it again as soon as it is killed.

    Yields what kills daemon and guardian together (docs/decisions/0015).
    """
    bench.kill_daemon()
    mark = [f"{name}={value}" for name, value in bench.environment().items() if name.startswith("QGPU_")]
    manager = Manager(bench.directory, bench.plane, ("env", *mark))
    bench.daemon_is(manager.start())

    def act(bench: Bench) -> None:
        _signal(signal.SIGKILL, daemons, guardians)(bench)
        bench.kill_daemon()
        bench.daemon_is(manager.start())

    yield act
    manager.close()


#: What is done, on which planes, and whether the daemon's plan holds again afterwards.
_CASES: tuple[tuple[str, Callable[[Bench], None], tuple[str, ...], bool], ...] = (
    ("daemon killed (-9)", _signal(signal.SIGKILL, daemons), ("seccomp", "kmod"), False),
    ("daemon stopped (SIGSTOP)", _signal(signal.SIGSTOP, daemons), ("seccomp", "kmod"), False),
    ("daemon ended (SIGTERM)", _signal(signal.SIGTERM, daemons), ("seccomp", "kmod"), False),
    ("guardian killed (-9)", _signal(signal.SIGKILL, guardians), ("seccomp",), True),
    ("guardian stopped (SIGSTOP)", _signal(signal.SIGSTOP, guardians), ("seccomp",), True),
    ("guardian and the one in reserve killed", _signal(signal.SIGKILL, reserves, guardians), ("seccomp",), True),
    ("supervisor stopped (SIGSTOP)", _signal(signal.SIGSTOP, supervisors), ("seccomp", "kmod"), True),
    ("daemon hangs (frozen)", _freeze(daemons), ("seccomp", "kmod"), False),
    ("guardian hangs (frozen)", _freeze(guardians), ("seccomp",), True),
)


def safe(world: World, watch: Watch, alone_rate: float, rows: list[Row], say: Callable[[str], None]) -> None:
    """Try every case and add a row for each; the daemon is started anew in between."""
    bench = world.bench
    bench.ask("pod.set", name="neighbour", cores=_CORES)

    def add(path: str, act: Callable[[Bench], None], *, goes_on: bool) -> None:
        policy(bench, "fixed-share", _PERIOD_MS)
        _wait_closed(world, watch)
        closed_at = now()
        act(bench)
        first, full = _seen(watch, closed_at, None if goes_on else alone_rate, _SEEN_S)
        _let_go(bench)
        bench.start_daemon()
        if not world.neighbour_lives():
            raise BenchError(f"{path}: the neighbour has died")
        policy(bench, "burst-share", 100)
        said = f"first step after {first:.3f} s" if first is not None else f"no step within {_SEEN_S:g} s"
        rows.append(Row("safe", path, safe_default_s=full, said=said, passed=full is not None and full <= 1))
        say(f"{path}: {full} s, {said}")

    for path, act, planes, goes_on in _CASES:
        if world.plane in planes:
            add(path, act, goes_on=goes_on)
    if world.plane == "seccomp":
        with _service(bench) as kill_both:
            add(_BOTH, kill_both, goes_on=True)


def moments(world: World, watch: Watch, alone_rate: float, count: int, say: Callable[[str], None]) -> list[Row]:
    """Do each of these things at moments drawn by lot, under load, and add up what is left over in the end."""
    bench = world.bench
    random = Random(count)  # noqa: S311 - no secret
    bench.ask("pod.set", name="neighbour", cores=_CORES)
    cases = [case for case in _CASES if world.plane in case[2]]
    worst: dict[str, list[float | None]] = {case[0]: [] for case in cases}
    before = _left_over(world)
    for number in range(count):
        path, act, _, goes_on = cases[number % len(cases)]
        policy(bench, random.choice(["fixed-share", "burst-share"]), random.choice([50, 500, _PERIOD_MS]))
        time.sleep(random.uniform(0.2, 1.2))
        at = now()
        act(bench)
        worst[path].append(_seen(watch, at, None if goes_on else alone_rate, _SEEN_S)[1])
        _let_go(bench)
        bench.start_daemon()
        if not world.neighbour_lives():
            raise BenchError(f"{path}: the neighbour has died")
    if world.plane == "seccomp":
        worst[_BOTH] = _both(world, watch, random, max(1, count // len(cases)))
    policy(bench, "burst-share", 100)
    time.sleep(1)
    after = _left_over(world)
    say(f"before: {before}; after {count} moments: {after}")
    rows = []
    for path, times in worst.items():
        slowest = None if None in times else max(each for each in times if each is not None)
        said = f"{len(times)} moments drawn by lot: {times}"
        rows.append(
            Row("moments", path, safe_default_s=slowest, said=said, passed=slowest is not None and slowest <= 1)
        )
    leaked = {what: (n, after[what]) for what, n in before.items() if after[what] > n}
    rows.append(Row("moments", "nothing is left over", said=f"{leaked or before}", passed=not leaked))
    return rows


def _both(world: World, watch: Watch, random: Random, count: int) -> list[float | None]:
    """Kill daemon and guardian together at moments drawn by lot, and let the service manager start the daemon."""
    bench, times = world.bench, list[float | None]()
    with _service(bench) as kill_both:
        for _ in range(count):
            time.sleep(random.uniform(0.2, 1.2))
            at = now()
            kill_both(bench)
            times.append(_seen(watch, at, None, _SEEN_S)[1])
            if not world.neighbour_lives():
                raise BenchError(f"{_BOTH}: the neighbour has died")
    _let_go(bench)
    bench.start_daemon()
    return times


def _left_over(world: World) -> dict[str, int]:
    """Count what could pile up: processes, descriptors, cgroups, RM's objects by the memory they take."""
    bench = world.bench
    with suppress(OSError):
        (cgroup.mount() / "qgpu-hangs").rmdir()
    ours = [process for process in bench.processes() if process.is_running()]
    group = cgroup.mount() / "qgpu"
    return {
        "processes": len(ours),
        "descriptors": sum(process.num_fds() for process in (*daemons(bench), *guardians(bench))),
        "cgroups": len(list(group.iterdir())) if group.exists() else 0,
        "bytes on the card": world.card_used(),
    }


def _let_go(bench: Bench) -> None:
    """Let what was stopped or frozen go on, and the daemon end."""
    _signal(signal.SIGCONT, guardians, supervisors)(bench)
    _thaw()
    bench.kill_daemon()


def _wait_closed(world: World, watch: Watch) -> None:
    """Wait until no step has come for a while: the gate is closed."""
    until = now() + 20 * world.bench.patience
    while now() < until:
        time.sleep(0.05)
        looks = watch.between(now() - 0.3, now())
        if len(looks) > 3 and looks[0].steps == looks[-1].steps and world.neighbour_lives():
            return
    raise BenchError("the neighbour's gate does not close")


def _seen(watch: Watch, since: float, rate: float | None, longest_s: float) -> tuple[float | None, float | None]:
    """Return when the first step came, and when it was safe: that is then, or at full ``rate`` where one is given."""
    while True:
        first = _first_step(watch, since)
        full = first if rate is None else _full_speed(watch, since, rate)
        if full is not None or now() > since + longest_s:
            return first, full
        time.sleep(0.1)


def _first_step(watch: Watch, since: float) -> float | None:
    looks = watch.between(since, now())
    return next((round(look.after - since, 3) for look in looks if look.steps > looks[0].steps), None)


def _full_speed(watch: Watch, since: float, alone_rate: float) -> float | None:
    for look in watch.between(since, now() - 0.5):
        if watch.rate(look.before, look.before + 0.5) >= 0.95 * alone_rate:
            return round(look.before - since, 3)
    return None
