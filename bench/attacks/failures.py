"""How soon a pod whose gate is closed runs again when daemon, guardian or launcher is killed, stopped or hangs.

The neighbour runs alone under Fixed Share with a small quota and the longest period. So its gate is nearly always
closed, and its own turn is known: a pod alone has it at the start of each period. Each failure happens while the gate
is closed and that turn is further away than is measured, so only the failure can cause a step. The result is the time
from the signal to that step, or, where no plan follows, to the start of half a second at full rate.

Where daemon and guardian go on, the script waits until the plan has closed the gate again: a second failure before
that would need a service manager's store (docs/decisions/0015-service.md). Where neither of them fails, the plan stays
in force, and the script waits for the neighbour's own next turn. To hang without a stop signal, a process is frozen in
a cgroup of its own.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random

import psutil
from harness import Bench, BenchError, wait_for

from attacks.judge import Row, Watch
from attacks.world import World, now, policy
from qgpu.errors import QgpuError
from qgpu.linux import cgroup
from tests.cli.manager import Manager

#: How long a step is waited for; the neighbour's own turn is further away.
_SEEN_S = 2.5
#: The longest period there is, and one in which a turn comes soon enough to be waited for.
_PERIOD_MS, _SHORT_MS = 10_000, 1000
_CORES = 5

#: Causes a failure and returns the moment of it.
Failure = Callable[[Bench], float]
Find = Callable[[Bench], list[psutil.Process]]


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


def standbys(bench: Bench) -> list[psutil.Process]:
    """Find the standby guardian."""
    return [process for process in _processes(bench, "qgpu.guardian") if process.name() == "qgpu-standby"]


def guardians(bench: Bench) -> list[psutil.Process]:
    """Find the guardian, but not the standby guardian; plane kmod has none."""
    return [process for process in _processes(bench, "qgpu.guardian") if process.name() == "qgpu-guardian"]


def launchers(bench: Bench) -> list[psutil.Process]:
    """Find the ``qgpuctl run`` that started the neighbour."""
    return [process for process in _processes(bench, "qgpu.cli.main") if "neighbour" in process.cmdline()]


def _signal(number: int, *finders: Find) -> Failure:
    def act(bench: Bench) -> float:
        processes = [found for finder in finders for found in finder(bench)]
        at = now()
        for process in processes:
            with suppress(psutil.Error):
                os.kill(process.pid, number)
        return at

    return act


def _freeze(find: Find) -> Failure:
    """Let processes hang without being stopped: in a frozen cgroup (v2) nothing runs, and nothing says so."""

    def act(bench: Bench) -> float:
        group = cgroup.mount() / "qgpu-hangs"
        group.mkdir(exist_ok=True)
        for process in find(bench):
            (group / "cgroup.procs").write_text(str(process.pid))
        at = now()
        (group / "cgroup.freeze").write_text("1")
        return at

    return act


def _thaw() -> None:
    """Let what is frozen go on, if anything is."""
    with suppress(OSError):
        (cgroup.mount() / "qgpu-hangs" / "cgroup.freeze").write_text("0")


@contextmanager
def _service(bench: Bench) -> Iterator[Callable[[Sequence[Find]], Failure]]:
    """Run the daemon as a service, whose manager keeps its descriptors and restarts it as soon as it is killed.

    Yields a function that returns the act of killing several processes at once, the daemon among them. Afterwards a
    plain daemon runs again, but not before the manager has closed the control socket: clients that connect to the one
    it kept would wait forever.
    """
    bench.kill_daemon()
    mark = [f"{name}={value}" for name, value in bench.environment().items() if name.startswith("QGPU_")]
    manager = Manager(bench.directory, bench.plane, ("env", *mark))
    bench.daemon_is(manager.start())

    def killing(finders: Sequence[Find]) -> Failure:
        def act(bench: Bench) -> float:
            at = _signal(signal.SIGKILL, *finders)(bench)
            bench.kill_daemon()
            bench.daemon_is(manager.start())
            return at

        return act

    try:
        yield killing
    finally:
        _end_daemon(bench)
        manager.close()
    bench.start_daemon()


class PlanAfter(enum.Enum):
    """What becomes of the daemon's plan."""

    ENDS = enum.auto()
    #: It ends, and is applied again.
    AGAIN = enum.auto()
    #: It stays in force.
    HOLDS = enum.auto()


#: The failures, on which planes, and what becomes of the plan. The names are those of the rows in isolation.json.
_CASES: tuple[tuple[str, Failure, tuple[str, ...], PlanAfter], ...] = (
    ("daemon killed (-9)", _signal(signal.SIGKILL, daemons), ("seccomp", "kmod"), PlanAfter.ENDS),
    ("daemon stopped (SIGSTOP)", _signal(signal.SIGSTOP, daemons), ("seccomp", "kmod"), PlanAfter.ENDS),
    ("daemon ended (SIGTERM)", _signal(signal.SIGTERM, daemons), ("seccomp", "kmod"), PlanAfter.ENDS),
    ("guardian killed (-9)", _signal(signal.SIGKILL, guardians), ("seccomp",), PlanAfter.AGAIN),
    ("guardian stopped (SIGSTOP)", _signal(signal.SIGSTOP, guardians), ("seccomp",), PlanAfter.AGAIN),
    (
        "guardian and the one in reserve killed",
        _signal(signal.SIGKILL, standbys, guardians),
        ("seccomp",),
        PlanAfter.AGAIN,
    ),
    ("launcher stopped (SIGSTOP)", _signal(signal.SIGSTOP, launchers), ("seccomp", "kmod"), PlanAfter.HOLDS),
    ("daemon hangs (frozen)", _freeze(daemons), ("seccomp", "kmod"), PlanAfter.ENDS),
    ("guardian hangs (frozen)", _freeze(guardians), ("seccomp",), PlanAfter.AGAIN),
)

#: What is killed at once under a service manager (docs/decisions/0015-service.md), in this order, because a guardian
#: that sees its daemon die opens gates itself; and how often, relative to the others, at random moments.
_AT_ONCE: tuple[tuple[str, tuple[Find, ...], int], ...] = (
    ("daemon and guardian killed, daemon restarted", (guardians, daemons), 2),
    ("daemon, guardian and the one in reserve killed, daemon restarted", (guardians, standbys, daemons), 1),
)


def safe(world: World, watch: Watch, alone_rate: float, rows: list[Row], say: Callable[[str], None]) -> None:
    """Try every case while the gate is closed, and add a row for each."""
    bench = world.bench
    bench.ask("pod.set", name="neighbour", cores=_CORES)

    def add(path: str, act: Failure, then: PlanAfter) -> None:
        first, full = _tried(world, watch, alone_rate, act, then)
        said = f"first step after {first:.3f} s" if first is not None else f"no step within {_SEEN_S:g} s"
        rows.append(Row("safe", path, safe_default_s=full, said=said, passed=full is not None and full <= 1))
        say(f"{path}: {full} s, {said}")

    for path, act, planes, then in _CASES:
        if world.plane in planes:
            add(path, act, then)
    if world.plane == "seccomp":
        with _service(bench) as killing:
            for path, finders, _ in _AT_ONCE:
                add(path, killing(finders), PlanAfter.AGAIN)
    policy(bench, "burst-share", 100)


def moments(
    world: World, watch: Watch, alone_rate: float, count: int, at_once: int, say: Callable[[str], None]
) -> list[Row]:
    """Cause each failure at random moments, under load, and count what is left over in the end.

    Every other time the gate is closed, as in ``safe``. Otherwise it is open, and the neighbour must not pause.
    """
    bench = world.bench
    random = Random(count)  # noqa: S311 - no secret
    bench.ask("pod.set", name="neighbour", cores=_CORES)
    cases = [case for case in _CASES if world.plane in case[2]]
    worst: dict[str, list[float | None]] = {}
    before = _left_over(world)

    def try_one(path: str, act: Failure, then: PlanAfter, *, closed: bool) -> None:
        found = _tried(world, watch, alone_rate, act, then, closed=closed, random=random)[1]
        worst.setdefault(path, []).append(found)
        say(f"{path}, its gate {'closed' if closed else 'open'}: {found} s")

    for number in range(count):
        path, act, _, then = cases[number % len(cases)]
        try_one(path, act, then, closed=number % 2 == 0)
    if world.plane == "seccomp":
        with _service(bench) as killing:
            for path, finders, weight in _AT_ONCE:
                for number in range(weight * at_once):
                    try_one(path, killing(finders), PlanAfter.AGAIN, closed=number % 3 < 2)
    policy(bench, "burst-share", 100)
    time.sleep(1)
    after = _left_over(world)
    say(f"before: {before}; after {sum(map(len, worst.values()))} moments: {after}")
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


def _tried(
    world: World,
    watch: Watch,
    alone_rate: float,
    act: Failure,
    then: PlanAfter,
    *,
    closed: bool = True,
    random: Random | None = None,
) -> tuple[float | None, float | None]:
    """Cause one failure; return when the first step came and when the pod was safe. Daemon and guardian run again then.

    With ``random`` the failure comes at a random moment.
    """
    bench = world.bench
    period_ms = _SHORT_MS if then is PlanAfter.HOLDS else _PERIOD_MS
    policy(bench, "fixed-share" if closed else "burst-share", period_ms)
    time.sleep(random.uniform(0.1, 0.7) if random is not None else 0)
    if closed:
        _wait_closed(world, watch, 0 if then is PlanAfter.HOLDS else _SEEN_S, period_ms / 1000)
    at = act(bench)
    first, full = _seen(watch, at, alone_rate if then is PlanAfter.ENDS else None, _SEEN_S)
    _signal(signal.SIGCONT, guardians, launchers)(bench)
    _thaw()
    if then is PlanAfter.ENDS:
        _end_daemon(bench)
        bench.start_daemon()
    elif closed:
        _wait_closed(world, watch, 0, period_ms / 1000)
    wait_for("the guardian to answer", lambda: _answers(bench), 30 * bench.timeout_factor)
    if not world.neighbour_lives():
        raise BenchError("the neighbour has died")
    return first, full


def _answers(bench: Bench) -> bool:
    """Tell whether the daemon lists pods and, on plane seccomp, guardian and standby guardian run."""
    try:
        return bool(bench.pods()) and (bench.plane != "seccomp" or bool(guardians(bench) and standbys(bench)))
    except QgpuError:
        return False


def _left_over(world: World) -> dict[str, int]:
    """Count what could pile up: processes, descriptors, cgroups, RM's objects by the memory they take."""
    bench = world.bench
    with suppress(OSError):
        (cgroup.mount() / "qgpu-hangs").rmdir()
    ours = [process for process in bench.processes() if process.is_running()]
    groups = [*cgroup.mount().glob("qgpu/*"), *cgroup.mount().rglob("qgpu-*")]
    return {
        "processes": len(ours),
        "descriptors": sum(process.num_fds() for process in (*daemons(bench), *guardians(bench))),
        "cgroups": sum(group.is_dir() for group in groups),
        "bytes on the card": world.card_used(),
    }


def _end_daemon(bench: Bench) -> None:
    """Continue what was stopped or frozen, and end the daemon."""
    _signal(signal.SIGCONT, guardians, launchers)(bench)
    _thaw()
    bench.kill_daemon()


def _wait_closed(world: World, watch: Watch, ahead_s: float, period_s: float) -> None:
    """Wait until no step has come for a while, so the gate is closed, and its turn is ``ahead_s`` away at least."""
    until = now() + (20 + period_s) * world.bench.timeout_factor
    while now() < until:
        time.sleep(0.05)
        looks = watch.between(now() - 0.3, now())
        still = len(looks) > 3 and looks[0].steps == looks[-1].steps and world.neighbour_lives()
        if still and period_s - now() % period_s > ahead_s:
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
