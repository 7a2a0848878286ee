"""Judges one attack by the neighbour's steps and the card's memory in use before, during and after it.

docs/decisions/0011-judging-isolation.md has the reasons.

Bytes over quota: what the card had in use while the attacker held all it could get, less what was in use before it
started, less its quota. The peak is the same at the worst moment.

Steps lost: the neighbour is guaranteed its quota of the rate that it makes alone on the card, measured in the same run.
Steps that are missing from that rate during the attack are lost, and so are steps missing from the full rate
afterwards. A fiftieth of a rate is allowed for measuring over only a second or two. What the neighbour gets beyond its
guarantee is shown as its share. Under Fixed Share the neighbour has its steps in one part of every period. So whole
periods are measured; otherwise half a turn at either end of two seconds would be 3 % of its guarantee.

A card does not always reach the full rate without an attack either: it is slower for some tenths of a second, although
no step is held up. So the same windows are measured while nothing is tried (row "nothing is tried", with the card's
clock). An attack after which steps are missing is made up to three times, because what it costs its neighbour after its
end, it costs each time. The least of these counts, and all are reported; of everything else (bytes, steps missing from
the guarantee, share) the worst counts. The last line of a run compares how often steps are missing after attacks and
without one. An attack whose kernel faults is always made three times.

An attacker that is refused everything proves nothing: an attack on memory counts only if the program reports that it
was granted some within its limit and refused more beyond it. An attack by profilers' calls from a pod that may profile
counts only if the program was granted such calls; from any other pod none may be granted. The judge believes nothing
else that a program reports, unless it speaks against qgpu: that a call reached what no pod may reach.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from harness import BenchError, tail

from attacks.cases import Case
from attacks.world import Attacker, World, end_attacker, neighbour_class, now, policy, start_attacker, start_pod

_NAME = "attacker"
#: Families that attack a memory limit, and what their programs report.
_MEMORY = frozenset({"cuda", "raw", "race"})
_GRANTED = re.compile(r"(?:granted|claimed) (\d+)")
_REFUSED = re.compile(r"refused (\d+)")
_REACHED = re.compile(r"reached (\d+)")
#: Families that attack with channels of their own, beside a flood.
_FLOODS = frozenset({"control", "profile"})
_READY_S = 25.0
#: A rate measured over a second or two is exact to this part of it, because turns and rounds are cut at its ends.
_EXACT = 0.98
_PERIOD_MS = 100
_SETTLE_S, _AFTER_S = 0.3, 0.5
_LOOKS = 8
#: How often an attack is made after which steps are missing, and one whose kernel faults.
_TRIES = 3


class StepReading(NamedTuple):
    """The neighbour's steps, and between which moments they were read."""

    before: float
    after: float
    steps: float


class CardReading(NamedTuple):
    """Bytes in use on the card and its clock, and when they were read."""

    at: float
    used: int
    mhz: int


@dataclass(slots=True)
class Watch:
    """Reads the neighbour's steps and the card's memory, in a thread each; looks from oldest to newest.

    The driver answers no question about the card while it recovers from a fault. So a look at the card may take long; a
    look at the steps asks nobody.
    """

    world: World
    seen: list[StepReading] = field(default_factory=list)
    card: list[CardReading] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._threads = [threading.Thread(target=look, daemon=True) for look in (self._look, self._look_at_card)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        while not self._over.wait(self.world.look_s):
            before, steps, after = now(), self.world.steps(), now()
            self.seen.append(StepReading(before, after, steps))

    def _look_at_card(self) -> None:
        while not self._over.wait(self.world.card_look_s):
            self.card.append(CardReading(now(), self.world.card_used(), self.world.clock_mhz()))

    def between(self, start: float, end: float) -> list[StepReading]:
        """Return what was seen of the neighbour from one moment to another."""
        first = bisect_left(self.seen, start, key=lambda look: look.before)
        last = bisect_right(self.seen, end, key=lambda look: look.after)
        return self.seen[first:last]

    def most_used(self, start: float, end: float) -> int:
        """Return the most bytes in use on the card between two moments; 0 if none was read."""
        return max((look.used for look in list(self.card) if start <= look.at <= end), default=0)

    def rate(self, start: float, end: float, turn_s: float = 0.0) -> float:
        """Return steps per second between two moments: the most that it can have been, because a look takes time.

        With ``turn_s``, measure between two looks, one near either end, that are most nearly whole turns apart.
        """
        looks = self.between(start, end)
        if not looks:
            return 0.0
        first, last = looks[0], looks[-1]
        if turn_s:
            firsts = [look for look in looks if look.before <= first.before + turn_s]
            lasts = [look for look in looks if look.before >= last.before - turn_s]
            pairs = [(a, b) for a in firsts for b in lasts if b.before - a.after >= turn_s / 2] or [(first, last)]
            first, last = min(pairs, key=lambda pair: abs(math.remainder(pair[1].before - pair[0].before, turn_s)))
        if last.before <= first.after:
            return 0.0
        return (last.steps - first.steps) / (last.before - first.after)

    def mean_mhz(self, start: float, end: float) -> float:
        """Return how fast the card ran between two moments; 0 where it has no clock."""
        clocks = [look.mhz for look in list(self.card) if start <= look.at <= end]
        return sum(clocks) / max(1, len(clocks))

    def longest_pause_s(self, start: float, end: float) -> float:
        """Return the longest time from a look with a new step to the next such look."""
        longest, since, last = 0.0, start, -1.0
        for look in self.between(start, end):
            longest = max(longest, look.before - since)
            if look.steps > last:
                since, last = look.after, look.steps
        return longest


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one attack."""

    family: str
    path: str
    bytes_over_quota: int | None = None
    peak_over_quota: int | None = None
    neighbour_steps_lost: int | None = None
    neighbour_share: float | None = None
    longest_pause_ms: float | None = None
    #: The same without qgpu: the same two programs, outside of any pod.
    plain_pause_ms: float | None = None
    pause_after_ms: float | None = None
    after_over_before: float | None = None
    safe_default_s: float | None = None
    said: str = ""
    passed: bool = True
    #: How often it was tried; and in how many windows steps were missing from the full rate.
    tries: int = 1
    windows_short: int = 0


def alone(watch: Watch, seconds: float) -> float:
    """Return the neighbour's rate alone on the card: the least that it can have been."""
    start = now()
    time.sleep(seconds)
    looks = watch.between(start, now())
    return (looks[-1].steps - looks[0].steps) / (looks[-1].after - looks[0].before)


def undisturbed(watch: Watch, alone_rate: float, times: int) -> Row:
    """Measure windows such as those after an attack, after nothing: the worst of them, and how many steps each lost."""
    rates, pauses, lost, clocks = [], [], [], []
    for _ in range(times):
        start = now()
        time.sleep(_AFTER_S)
        ended = now()
        rates.append(watch.rate(start, ended))
        pauses.append(watch.longest_pause_s(start, ended))
        lost.append(_missing(rates[-1], alone_rate, ended - start))
        clocks.append(watch.mean_mhz(start, ended))
    return Row(
        "nothing",
        "nothing is tried",
        neighbour_steps_lost=round(max(lost)),
        pause_after_ms=round(max(pauses) * 1e3, 1),
        after_over_before=round(min(rates) / alone_rate, 3),
        said=f"{times} times, each's rate by the rate alone, and the card's MHz: "
        + " ".join(f"{rate / alone_rate:.3f}@{mhz:.0f}" for rate, mhz in zip(rates, clocks, strict=True)),
        passed=round(statistics.median(lost)) == 0,
        tries=times,
        windows_short=sum(round(each) > 0 for each in lost),
    )


def _missing(rate: float, due: float, seconds: float) -> float:
    """Return the steps that are missing from a rate, to within the exactness of measuring."""
    return max(0.0, _EXACT * due - rate) * seconds


def controlled(said: str) -> bool:
    """Tell whether a program reports both memory that it was granted and a refusal."""
    granted, refused = _GRANTED.search(said), _REFUSED.search(said)
    return bool(granted and refused and int(granted[1]) and int(refused[1]))


def reached(said: str) -> int | None:
    """Return how often a program says that it reached what no pod may reach; None if it does not say."""
    found = _REACHED.search(said)
    return int(found[1]) if found is not None else None


def against_the_grant(said: str, *, may_profile: bool) -> str:
    """Return why the answers to profilers' calls are wrong for a pod that may profile, or may not; empty if right."""
    granted = _GRANTED.search(said)
    if granted is None or reached(said) is None:
        return "not judged"
    if reached(said):
        return "reached what no pod may reach"
    if may_profile and not int(granted[1]):
        return "not judged, refused all of it"
    return "" if may_profile or not int(granted[1]) else "granted without the grant"


def plain_pause_ms(world: World, watch: Watch, case: Case) -> float:
    """Run one attacker outside of any pod, beside a neighbour that is in none; return the neighbour's longest pause.

    It runs as often as in a pod, because pauses differ by much.
    """
    longest_s = 0.0
    for _ in range(_TRIES):
        report, log = _report(world), world.bench.directory / "attacker.log"
        started = now()
        process = start_pod(world.bench, _NAME, None, _command(world, case), log)
        _attacked(world, case, process, started, report)
        ended = now()
        process.kill()
        process.wait()
        longest_s = max(longest_s, watch.longest_pause_s(started, ended))
    return round(longest_s * 1e3, 1)


def judge(
    world: World, watch: Watch, case: Case, alone_rate: float, quota: float, plain_ms: float | None = None
) -> Row:
    """Run one attacker beside a neighbour that has ``quota`` of the card, and return the result.

    ``plain_ms`` is the neighbour's longest pause without qgpu, where it was measured.
    """
    rows, durings, afters = [], [], []
    while len(rows) < _TRIES and (not rows or round(afters[-1]) or case.kernel_faults):
        row, during, after = _once(world, watch, case, alone_rate, quota)
        if row.bytes_over_quota is None:  # it fails; what it had in an earlier try is reported all the same
            over = max((each.bytes_over_quota or 0 for each in rows), default=None)
            return replace(row, bytes_over_quota=over, passed=False)
        rows.append(row)
        durings.append(during)
        afters.append(after)
    lost = round(max(durings) + min(afters))
    again = f"; tried {len(rows)} times, steps missing after each: {' '.join(f'{each:.0f}' for each in afters)}"
    return replace(
        rows[-1],
        bytes_over_quota=max(row.bytes_over_quota or 0 for row in rows),
        peak_over_quota=max(row.peak_over_quota or 0 for row in rows),
        neighbour_steps_lost=lost,
        neighbour_share=min(row.neighbour_share or 0 for row in rows),
        longest_pause_ms=max(row.longest_pause_ms or 0 for row in rows),
        plain_pause_ms=plain_ms,
        pause_after_ms=max(row.pause_after_ms or 0 for row in rows),
        said=rows[-1].said + (again if len(rows) > 1 else ""),
        passed=lost == 0 and all(row.passed and row.bytes_over_quota == 0 for row in rows),
        tries=len(rows),
        windows_short=sum(round(each) > 0 for each in afters),
    )


def _report(world: World) -> Path:
    """Return the file in which an attacker reports, and remove what earlier ones wrote."""
    for leftover in world.bench.directory.glob("report*"):
        leftover.unlink()
    return world.bench.directory / "report"


def _command(world: World, case: Case) -> list[str]:
    folder = world.bench.directory
    more = [world.arguments[case.program]] if case.program in world.arguments else []
    return [str(folder / case.program), case.mode, str(folder / "report"), str(world.quota), *more]


def _attacked(world: World, case: Case, process: subprocess.Popen[bytes], started: float, report: Path) -> float:
    """Wait until an attacker has reported and the case is over; return when it reported."""
    longest_s = _READY_S * world.bench.timeout_factor
    while not report.exists() and process.poll() is None and now() < started + longest_s:
        time.sleep(0.01)
    reported = now()
    time.sleep(case.lasts_s)
    if case.ends:
        process.wait(longest_s)
    return reported


def _once(world: World, watch: Watch, case: Case, alone_rate: float, quota: float) -> tuple[Row, float, float]:
    """Make an attack once; return the result, and the steps that were missing during it and after it."""
    bench = world.bench
    report = _report(world)
    log = bench.directory / "attacker.log"
    policy(bench, case.policy, _PERIOD_MS)
    command = _command(world, case)
    if (
        world.attacker is Attacker.MEMBER and case.family in _FLOODS
    ):  # these attack with channels of their own: a member without MPS
        command = ["env", "CUDA_MPS_PIPE_DIRECTORY=/nowhere", *command]
    started, base = now(), world.card_used()
    grant = ["--cores", str(case.cores), "--memory", f"{world.quota >> 20}MiB"]
    if case.online:
        neighbour_class(bench, "online")
    process = start_attacker(world, _NAME, grant, command, log)
    reported = _attacked(world, case, process, started, report)
    held, ended = min(world.card_used() for _ in range(3)), now()
    said = report.read_text().strip() if report.exists() else f"no report: {tail(log, 2)}"
    end_attacker(world, _NAME, process)
    if case.online:
        neighbour_class(bench, "offline")
    policy(bench, "burst-share", _PERIOD_MS)
    gone = now() + _SETTLE_S
    time.sleep(_SETTLE_S + _AFTER_S)
    until = now() + 10 * bench.timeout_factor
    while len(watch.between(gone, now())) < _LOOKS and now() < until:  # an emulated machine may have held us up
        time.sleep(0.1)
    after_ended = now()
    if not world.neighbour_lives():
        raise BenchError(f"{case.path}: the neighbour has died")
    if said.startswith(("cannot start", "no report")) or not (case.family not in _MEMORY or controlled(said)):
        return Row(case.family, case.path, said=f"not judged: {said}", passed=False), 0, 0
    if case.family == "profile":
        wrong = against_the_grant(said, may_profile=world.attacker is Attacker.PROFILER)
    else:
        wrong = "reached what no pod may reach" if reached(said) else ""
    if wrong.startswith("not judged"):
        return Row(case.family, case.path, said=f"{wrong}: {said}", passed=False), 0, 0
    since = reported if case.family in _FLOODS else started
    during = watch.rate(since, ended, _PERIOD_MS / 1e3 if case.policy == "fixed-share" else 0.0)
    after = watch.rate(gone, after_ended)
    peak = max(held, watch.most_used(started, ended))
    row = Row(
        case.family,
        case.path,
        bytes_over_quota=max(0, held - base - world.quota),
        peak_over_quota=max(0, peak - base - world.quota),
        neighbour_share=round(during / alone_rate, 3),
        longest_pause_ms=round(watch.longest_pause_s(since, ended) * 1e3, 1),
        pause_after_ms=round(watch.longest_pause_s(gone, after_ended) * 1e3, 1),
        after_over_before=round(after / alone_rate, 3),
        said=f"{wrong}: {said}" if wrong else said,
        passed=not wrong,
    )
    missing = _missing(during, quota * alone_rate, ended - since)
    return row, missing, _missing(after, alone_rate, after_ended - gone)
