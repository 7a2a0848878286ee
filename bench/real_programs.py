"""(i) Unmodified torch programs beside each other: plain sharing, MPS and qgpu.

    python bench/real_programs.py                                   # all, on a GPU with torch: twenty minutes
    python bench/real_programs.py --only real_gappy                 # one section; figures of the others are kept
    python bench/real_programs.py --name h100-real --out /tmp/r     # for another card

Pods and plain processes load their programs first and rest until asked, so plain sharing and qgpu are measured in turn,
seconds apart. A way to share stays set for all of its spans. A speed is in steps per second, relative to the speed of
the program alone in a plain process, which is measured before, between and after. MPS comes last, without a daemon. Its
clients are limited to 66 and 33 % of the threads where 2:1 is asked, and not limited elsewhere. NVML reports how busy
the card was. All pairs in every way: NAME-rows.json.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import online_latency
from figures import NOTHING, Asked, Figure, at_least, at_most, between, median
from plots import Plot
from pods import BenchError
from real_pairs import (
    BEST_EFFORT,
    BURST,
    FIXED,
    MPS_2_1,
    MPS_FREE,
    PLAIN,
    Alone,
    Pair,
    PairResult,
    Sharing,
    farthest,
    least_by_chance,
    rounded,
    row,
    twice,
    worst_p99_ms,
)
from rivals import mps, mps_present
from script import NotHereError, Script, listed, run, spread
from torch_processes import SpanResult, TorchProcesses

from qgpu.model import NS_PER_MS

REPEATS, REPEATS_QUICK, REPEATS_MPS = 5, 2, 2
#: How often a program that leaves gaps is measured alone each time: its speed is the host's, which is unsteady.
ALONE_SPANS = 2


@dataclass(frozen=True, slots=True)
class Times:
    """How long spans are, and the time before them to settle, in s.

    Pods rest during a plain span. After two seconds of rest the ledger would have forgotten them.
    """

    span: float = 2.0
    settle: float = 0.7
    plain: float = 1.2
    plain_settle: float = 0.3
    #: Additional time before the first span of a pair, in which qgpu learns it.
    learn: float = 1.5


GAPPY = Times(span=1.0, settle=0.45, plain=1.0, plain_settle=0.2, learn=2.5)
FULL = Times(span=3.0, settle=1.0)
BEST = Times(span=2.0, settle=0.7, plain=1.5)
SERVICE = Times(span=4.0, settle=1.5, plain=4.0)

TWO_ONE = Sharing("burst 66/33", BURST, (66, 33))
EVEN = Sharing("burst 50/50", BURST, (50, 50))
BEST_OF = Sharing("best-effort", BEST_EFFORT)
SHORT = Sharing("burst 66/33, 20 ms", BURST, (66, 33), period_ms=20)
WEIGHTED = Sharing("online burst 66/33", BURST, (66, 33), online=True)
BESIDE = Sharing("online beside offline", BURST)
#: The offline program waits for the card nearly all the time, so what it costs its neighbour comes from the host.
KEPT_OFF = Sharing("offline has 1 %", FIXED, (None, 1))
#: Names of processes: pods, online pods, plain ones, and clients of MPS by their limit.
PODS, ONLINE, MIXED, PLAINS = ("a", "b"), ("oa", "ob"), ("oa", "a"), ("pa", "pb")
CLIENTS = {MPS_2_1: ("ma", "mb"), MPS_FREE: ("fa", "fb")}
PERCENT = {"ma": 66, "mb": 33}


GAPPY_PAIRS = (
    *(twice(name) for name in ("resnet-eager-8", "resnet-eager-16", "resnet-eager-32", "decoder-eager")),
    twice("training-small"),
    Pair("training-large", "decoder-eager"),
)
FULL_PAIRS = (twice("decoder-graph"), twice("training-large"))
BEST_PAIRS = (twice("decoder-graph"), twice("resnet-graph-16"))
ONLINE_PAIR, SERVICE_PAIR = twice("decoder-graph"), Pair("service-eager", "training-large")
COPY_PAIRS = tuple(twice(f"copy-{direction}") for direction in ("h2d", "d2h", "d2d"))
FLOOD_PAIR = Pair("decoder-graph", "copy-h2d")


# Measuring


def programs_of(pairs: Iterable[tuple[Sequence[str], Pair]]) -> dict[str, list[str]]:
    """Return, by process name, the programs it has to load: loading takes time and memory of the card."""
    wanted: dict[str, dict[str, None]] = {}
    for names, pair in pairs:
        for name, program in zip(names, pair.programs, strict=True):
            wanted.setdefault(name, {})[program] = None
    return {name: list(programs) for name, programs in wanted.items()}


@contextmanager
def _workers(
    script: Script, cases: Iterable[tuple[tuple[str, str], Pair]], *, cpus_apart: bool = False
) -> Iterator[TorchProcesses]:
    """Run a daemon, and pods and plain processes that have loaded the programs of the pairs."""
    pods = list(cases)
    with script.bench.daemon():
        workers = TorchProcesses(script, cpus_apart=cpus_apart)
        # The first plain process runs every program alone.
        every = [((PLAINS[0],) * 2, pair) for _, pair in pods]
        for name, programs in programs_of([*((PLAINS, pair) for _, pair in pods), *every]).items():
            workers.outside(name, programs)
        for name, programs in programs_of(pods).items():
            workers.pod(name, programs, pod_class="online" if name in ONLINE else "offline")
        workers.wait_ready()
        yield workers


def _share(script: Script, sharing: Sharing, pods: tuple[str, str]) -> None:
    """Set a way to share, live."""
    bench = script.bench
    policy = {"online_policy" if sharing.online else "policy": sharing.policy}
    standing = {pod["name"]: pod["grants"][0]["cores"] for pod in bench.pods()}
    wanted = dict(zip(pods, sharing.quotas or (None, None), strict=True))
    # Quotas that shrink go first, so that the sum always fits.
    ordered = sorted(standing, key=lambda name: (wanted.get(name) or 0) - (standing[name] or 0))
    quotas = [
        partial(bench.ask, "pod.set", name=name, cores=wanted.get(name))
        for name in ordered
        if wanted.get(name) != standing[name]
    ]
    chosen = [partial(bench.ask, "gpu.set", gpu=0, period_ns=sharing.period_ms * NS_PER_MS, **policy)]
    # Fixed Share needs quotas, so they come before it and go after it.
    for change in (*quotas, *chosen) if sharing.policy == FIXED else (*chosen, *quotas):
        change()


def _repeats(script: Script) -> int:
    return REPEATS if script.scale == 1 else REPEATS_QUICK


def _alone(
    script: Script, workers: TorchProcesses, alone: Alone, pairs: Iterable[Pair], times: Times, spans: int = 1
) -> None:
    """Measure each program of pairs alone, in a plain process, for some spans."""
    for program in list(dict.fromkeys(name for pair in pairs for name in pair.programs)) * spans:
        span = workers.take({PLAINS[0]: program}, times.plain_settle, times.plain)
        alone.add(program, span)
        process = span.processes[0]
        text = f"{process.speed:.4g} steps/s, p99 {process.p99_ms:.4g} ms, card busy {span.busy:.2f}"
        script.say(f"{program}: alone {text}")


def _in_turn(
    script: Script,
    workers: TorchProcesses,
    pair: Pair,
    sharings: Sequence[Sharing],
    times: Times,
    pods: tuple[str, str] = PODS,
    between: Callable[[], object] | None = None,
) -> PairResult:
    """Measure a pair in each way to share, and plainly before, between and after the spans of that way.

    A way stays set for all of its spans, so qgpu learns it once. ``between`` runs before each way and after the last.
    """
    found = PairResult(pair)
    plain, shared = (dict(zip(names, pair.programs, strict=True)) for names in (PLAINS, pods))
    for sharing in sharings:
        if between is not None:
            between()
        _share(script, sharing, pods)
        plains, spans = found.plain.setdefault(sharing, []), found.shared.setdefault(sharing, [])
        for number in range(_repeats(script)):
            plains.append(workers.take(plain, times.plain_settle, times.plain))
            spans.append(workers.take(shared, times.settle + (0 if number else times.learn), times.span))
        plains.append(workers.take(plain, times.plain_settle, times.plain))
    if between is not None:
        between()
    return found


def _by_mps(
    script: Script, cases: Sequence[tuple[PairResult, str]], times: Times, alone: Alone, *, cpus_apart: bool = False
) -> None:
    """Measure pairs under MPS, each with its clients; if MPS fails, say so and leave it out."""
    if not mps_present():
        script.say("MPS is not here")
        return
    try:
        with mps(script.bench) as service:
            workers = TorchProcesses(script, cpus_apart=cpus_apart)
            for name, programs in programs_of((CLIENTS[kind], found.pair) for found, kind in cases).items():
                workers.outside(name, programs, service.client(PERCENT.get(name)))
            workers.wait_ready()
            for found, kind in cases:
                asked = dict(zip(CLIENTS[kind], found.pair.programs, strict=True))
                spans = [workers.take(asked, times.plain_settle, times.plain) for _ in range(REPEATS_MPS)]
                found.mps[kind] = spans
                _say(script, found, kind, spans, alone)
    except (BenchError, OSError, SystemExit) as error:  # on SIGTERM too: keep the other results
        script.say(f"MPS is left out: {error}")


def _say(script: Script, found: PairResult, way: str, spans: Sequence[SpanResult], alone: Alone) -> None:
    told = row("", found, way, spans, alone)
    script.say(
        f"{found.pair.name}, {way}: over alone {listed(each or 0 for each in told['over_alone'])}"
        f", sum {told['sum_over_alone']}; p99 {told['p99_ms']} ms; card busy {told['utilisation']}"
    )


def _say_all(script: Script, found: PairResult, alone: Alone) -> None:
    for way, spans in found.ways().items():
        _say(script, found, way, spans, alone)


def _keep(script: Script, section: str, all_found: Sequence[PairResult], alone: Alone) -> None:
    """Store a row for each pair in each way, and for each program alone."""
    for program, spans in alone.spans.items():
        by_itself = {
            "section": section,
            "pair": program,
            "way": "alone",
            "steps_per_s": rounded([alone.speed(program)]),
            "spread": rounded(alone.slowest_and_fastest(program)),
            "p99_ms": rounded([alone.p99_ms(program)]),
            "utilisation": rounded([alone.busy(program)])[0],
            "spans": len(spans),
        }
        script.rows.append(by_itself)
    for found in all_found:
        script.rows += [row(section, found, way, spans, alone) for way, spans in found.ways().items()]


def _plot(title: str, all_found: Sequence[PairResult], sharing: Sharing, alone: Alone) -> Plot:
    """Draw the speeds of both programs of pairs plainly, by MPS and by qgpu."""
    lines: dict[str, list[tuple[object, ...]]] = {}
    for found in all_found:
        ways = {
            PLAIN: found.plain[sharing],
            sharing.mps: found.mps.get(sharing.mps, []),
            "qgpu": found.shared[sharing],
        }
        for way, spans in ways.items():
            columns = zip(*(found.relative(span, alone) for span in spans), strict=True)
            for place, values in zip(_places(found.pair), columns, strict=False):
                lines.setdefault(way, []).append(spread(place, values))
    return Plot(f"{title}: {sharing.name}", "", "steps over the program alone", lines)


def _places(pair: Pair) -> tuple[str, str]:
    if pair.first == pair.second:
        return f"{pair.first} (1)", f"{pair.second} (2)"
    return f"{pair.first} +", f"+ {pair.second}"


def _sum_plot(all_found: Sequence[PairResult], alone: Alone) -> Plot:
    """Draw the sum of both speeds of each pair in every way."""
    lines: dict[str, list[tuple[object, ...]]] = {}
    for found in all_found:
        for way, spans in found.ways().items():
            lines.setdefault(way, []).append(spread(found.pair.name, found.totals(spans, alone)))
    return Plot("both together", "", "sum of steps over the program alone", lines)


def _need_card(script: Script) -> None:
    if script.bench.simulated or importlib.util.find_spec("torch") is None:
        raise NotHereError("needs torch and a GPU")


# Sections


def gappy(script: Script) -> list[Figure]:
    """Measure programs with gaps that other programs can use: the sum is no less than under plain sharing."""
    _need_card(script)
    alone, all_found = Alone(), []
    sharings = (TWO_ONE, EVEN, BEST_OF)
    with _workers(script, ((PODS, pair) for pair in GAPPY_PAIRS), cpus_apart=True) as workers:
        for pair in GAPPY_PAIRS:
            between = partial(_alone, script, workers, alone, [pair], GAPPY, ALONE_SPANS)
            all_found.append(_in_turn(script, workers, pair, sharings, GAPPY, between=between))
            _say_all(script, all_found[-1], alone)
    cases = [(found, kind) for kind in (MPS_2_1, MPS_FREE) for found in all_found]
    _by_mps(script, cases, GAPPY, alone, cpus_apart=True)
    _keep(script, "real_gappy", all_found, alone)
    script.plots += [_plot("programs that leave gaps", all_found, sharing, alone) for sharing in sharings]
    script.plots.append(_sum_plot(all_found, alone))
    return _gappy_figures(all_found, sharings, alone)


def _gappy_figures(all_found: Sequence[PairResult], sharings: Sequence[Sharing], alone: Alone) -> list[Figure]:
    """Judge sums and floors; beside them, the same of plain spans: what the host's own unsteadiness makes of them."""
    sums: dict[str, Figure] = {}
    floors: dict[str, Figure] = {}
    plain_floors: dict[str, Figure] = {}
    for found in all_found:
        for sharing in sharings:
            name, what = f"{found.pair.tag}_{sharing.tag}", f"{found.pair.name}, {sharing.name}"
            note = f"{what}: sum of speeds under qgpu over that of plain spans before and after"
            gained = found.gained(sharing, alone)
            sums[what] = median(f"gappy_sum_over_plain_{name}", gained, note=note)
            note = f"{what}: the pod that is worse off, its speed over what its quota is good for"
            for way, spans, by in (("", found.shared[sharing], floors), ("_plain", found.plain[sharing], plain_floors)):
                worse = min(found.floors(spans, sharing, alone), key=statistics.median)
                by[what] = median(f"gappy_floor{way}_{name}", worse, note=f"{note}{', plain' if way else ''}")
    again = {
        found.pair.name: median(f"gappy_sum_plain_over_plain_{found.pair.tag}", found.plain_again(alone))
        for found in all_found
    }
    over = "speed over alone over quota / utilisation alone, 1 at most"
    again_all = [each for figure in again.values() for each in figure.repeats]
    rounds = max(len(figure.repeats) for figure in sums.values())
    chance = statistics.quantiles(least_by_chance(again_all, len(sums), rounds), n=20)
    by_chance = (
        f"the same if every way were plain sharing: drawn from {len(again_all)} plain spans; 5, 50 and 95 of 100"
    )
    return [
        _least("gappy_sum_over_plain", sums, at_least(0.97), "sum of speeds under qgpu over plain sharing"),
        _least("gappy_floor", floors, at_least(0.9), over),
        _least("gappy_sum_plain_over_plain", again, NOTHING, "sum of speeds of plain spans over those beside them"),
        _least("gappy_floor_plain", plain_floors, NOTHING, f"plain sharing: {over}"),
        median("gappy_sum_over_plain_by_chance", (chance[0], chance[9], chance[-1]), note=by_chance),
        _together("gappy_sum_over_plain_all", sums),
        _together("gappy_sum_plain_over_plain_all", again),
        _together("gappy_floor_all", floors),
        _together("gappy_floor_plain_all", plain_floors),
        *sums.values(),
        *floors.values(),
        *again.values(),
        *plain_floors.values(),
    ]


def _together(name: str, parts: Mapping[str, Figure]) -> Figure:
    """Return the median of all rounds of all pairs and ways."""
    return median(name, [each for part in parts.values() for each in part.repeats], note="all rounds together")


def _least(name: str, parts: Mapping[str, Figure], asked: Asked, note: str) -> Figure:
    """Return the least of some figures, with its name."""
    worst = min(parts, key=lambda what: parts[what].value)
    return median(name, [part.value for part in parts.values()], *asked, note=f"{note}; least: {worst}", pick=min)


def full(script: Script) -> list[Figure]:
    """Measure programs that fill the card: twice the quota is twice the speed, and nothing is lost."""
    _need_card(script)
    alone, all_found = Alone(), []
    with _workers(script, ((PODS, pair) for pair in FULL_PAIRS)) as workers:
        for pair in FULL_PAIRS:
            _alone(script, workers, alone, FULL_PAIRS, FULL)
            sharings = (TWO_ONE, SHORT) if pair == FULL_PAIRS[0] else (TWO_ONE,)
            all_found.append(_in_turn(script, workers, pair, sharings, FULL))
            _say_all(script, all_found[-1], alone)
        _alone(script, workers, alone, FULL_PAIRS, FULL)
    _by_mps(script, [(found, MPS_2_1) for found in all_found], FULL, alone)
    _keep(script, "real_full", all_found, alone)
    script.plots.append(_plot("programs that fill the card", all_found, TWO_ONE, alone))
    short = all_found[0]
    worst = [worst_p99_ms(span) for span in short.shared[SHORT]]
    totals = short.totals(short.shared[SHORT], alone)
    note = f"{short.pair.name}, {SHORT.name}"
    return [
        *_two_one("full", all_found, TWO_ONE, alone, (1.96, 2.04), 0.97),
        median("period_20ms_p99_ms", worst, *at_most(25, " ms"), note=f"{note}: p99 of a step, the worse pod"),
        median("period_20ms_total", totals, *at_least(0.95), note=f"{note}: sum of speeds over alone"),
    ]


def _two_one(
    name: str,
    all_found: Sequence[PairResult],
    sharing: Sharing,
    alone: Alone,
    ratio: tuple[float, float],
    total: float,
) -> list[Figure]:
    """Return the error of the pair farthest from 2:1 and the least sum of speeds, and both for each pair."""
    ratios = {
        found.pair.name: median(f"{name}_ratio_{found.pair.tag}", found.ratios(sharing, alone)) for found in all_found
    }
    totals = {
        found.pair.name: median(f"{name}_total_{found.pair.tag}", found.totals(found.shared[sharing], alone))
        for found in all_found
    }
    values = [figure.value for figure in ratios.values()]
    worst = next(what for what, figure in ratios.items() if figure.value == farthest(values, 2))
    note = f"{sharing.name}: first pod's speed over the second's, the farthest from 2: {worst}"
    return [
        median(f"{name}_ratio_2_1", values, *between(*ratio), note=note, pick=lambda all_: farthest(all_, 2)),
        _least(f"{name}_total", totals, at_least(total), f"{sharing.name}: sum of speeds over alone"),
        *ratios.values(),
        *totals.values(),
    ]


def best_effort(script: Script) -> list[Figure]:
    """Measure programs that fill the card without settings: latency and sum are near plain sharing's or better."""
    _need_card(script)
    alone, all_found = Alone(), []
    with _workers(script, ((PODS, pair) for pair in BEST_PAIRS)) as workers:
        for pair in BEST_PAIRS:
            _alone(script, workers, alone, BEST_PAIRS, BEST)
            all_found.append(_in_turn(script, workers, pair, (BEST_OF,), BEST))
            _say_all(script, all_found[-1], alone)
        _alone(script, workers, alone, BEST_PAIRS, BEST)
    _by_mps(script, [(found, MPS_FREE) for found in all_found], BEST, alone)
    _keep(script, "real_best_effort", all_found, alone)
    script.plots.append(_plot("nothing asked", all_found, BEST_OF, alone))
    late, sums = {}, {}
    for found in all_found:
        tag, what = found.pair.tag, found.pair.name
        pods = [found.over_plain(BEST_OF, _p99_of(number)) for number in range(2)]
        late[what] = median(f"best_effort_p99_over_plain_{tag}", max(pods, key=statistics.median))
        sums[what] = median(f"best_effort_total_over_plain_{tag}", found.gained(BEST_OF, alone))
    worst = max(late, key=lambda what: late[what].value)
    values = [figure.value for figure in late.values()]
    note = f"p99 of a step over plain sharing, the worse pod; worst: {worst}"
    return [
        median("best_effort_p99_over_plain", values, *at_most(1.3), note=note, pick=max),
        _least("best_effort_total_over_plain", sums, at_least(1), "sum of speeds under qgpu over plain sharing"),
        *late.values(),
        *sums.values(),
    ]


def _p99_of(number: int) -> Callable[[SpanResult], float]:
    return lambda span: span.processes[number].p99_ms


def online(script: Script) -> list[Figure]:
    """Measure online pods: two that share 2:1, and a service beside training."""
    _need_card(script)
    pairs = (ONLINE_PAIR, SERVICE_PAIR)
    alone = Alone()
    with _workers(script, ((ONLINE, ONLINE_PAIR), (MIXED, SERVICE_PAIR))) as workers:
        _alone(script, workers, alone, pairs, SERVICE)
        weighted = _in_turn(script, workers, ONLINE_PAIR, (WEIGHTED,), FULL, ONLINE)
        _say_all(script, weighted, alone)
        _alone(script, workers, alone, [ONLINE_PAIR], SERVICE)
        between = partial(_alone, script, workers, alone, [SERVICE_PAIR], SERVICE)
        service = _in_turn(script, workers, SERVICE_PAIR, (BESIDE, KEPT_OFF), SERVICE, MIXED, between)
        _say_all(script, service, alone)
    _by_mps(script, [(weighted, MPS_2_1), (service, MPS_FREE)], SERVICE, alone)
    _keep(script, "real_online", [weighted, service], alone)
    script.plots += [
        _plot("two online pods", [weighted], WEIGHTED, alone),
        _plot("an online service beside training", [service], BESIDE, alone),
        _p99_plot(service, BESIDE, alone),
    ]
    return [*_weighted_figures(weighted, alone), *_service_figures(service, alone)]


def _weighted_figures(found: PairResult, alone: Alone) -> list[Figure]:
    spans, note = found.shared[WEIGHTED], f"two online pods, {ONLINE_PAIR.name}, 66/33"
    ideal_ms = [alone.median_ms(ONLINE_PAIR.first) / part for part in (2 / 3, 1 / 3)]
    over = [[span.processes[pod].p99_ms / ideal_ms[pod] for span in spans] for pod in range(2)]
    told = f"{note}: p99 of a step over a step alone / share asked, the worse pod"
    # Two steps of one pod and one of the other need four turns, because a turn ends with its step.
    possible = [3 / (3 + 4 * (1 / total - 1)) for total in found.totals(found.plain[WEIGHTED], alone)]
    why = "two steps and one, with the switches that plain sharing's total shows: two for every two steps"
    return [
        median("online_weighted_ratio", found.ratios(WEIGHTED, alone), *between(1.94, 2.06), note=note),
        median("online_weighted_total", found.totals(spans, alone), *at_least(0.95), note=note),
        median("online_weighted_total_possible", possible, note=why),
        median("online_weighted_p99_over_ideal", max(over, key=statistics.median), *at_most(1.25), note=told),
    ]


def _service_figures(found: PairResult, alone: Alone) -> list[Figure]:
    name = SERVICE_PAIR.first
    by_itself = [span.processes[0].p99_ms / alone.p99_ms(name) for span in alone.spans[name]]
    told = f"{name}: p99 of a request in one span alone over the median of such spans"
    figures = [median("eager_service_p99_alone_over_alone", by_itself, note=told, pick=max)]
    note = f"{name} (online) beside {SERVICE_PAIR.second}"
    ways = (
        ("", found.shared[BESIDE], note),
        ("_plain", found.plain[BESIDE], note),
        ("_mps", found.mps.get(MPS_FREE, []), note),
        ("_kept_off", found.shared[KEPT_OFF], f"{note}, which has 1 % of the card: what it takes of the host shows"),
    )
    for tag, spans, told in ways:
        if not spans:
            continue
        most, least = (NOTHING, NOTHING) if tag else (at_most(1.10), at_least(0.52))
        late = [span.processes[0].p99_ms / alone.p99_ms(name) for span in spans]
        middle = [span.processes[0].median_ms / alone.median_ms(name) for span in spans]
        kept = [found.relative(span, alone)[1] for span in spans]
        late_note = f"{told}: p99 of a request over that alone before and after, some {alone.p99_ms(name):.4g} ms"
        figures += [
            median(f"eager_service_p99_over_alone{tag}", late, *most, note=late_note),
            median(f"eager_service_median_over_alone{tag}", middle, note=f"{told}: median of a request likewise"),
            median(f"eager_service_offline_kept{tag}", kept, *least, note=f"{told}: speed over alone"),
        ]
    return figures


def _p99_plot(found: PairResult, sharing: Sharing, alone: Alone) -> Plot:
    """Draw how late the first program's steps are in each way."""
    ways = {PLAIN: found.plain[sharing], **found.mps, "qgpu": found.shared[sharing]}
    name = found.pair.first
    lines = {way: [(name, statistics.median(span.processes[0].p99_ms for span in s))] for way, s in ways.items() if s}
    title = f"{name} beside {found.pair.second}"
    return Plot(title, "", "p99, ms", {"alone": [(name, alone.p99_ms(name))], **lines})


def copies(script: Script) -> list[Figure]:
    """Measure programs that copy: quotas hold for the copy engines as they do for kernels."""
    _need_card(script)
    pairs = (*COPY_PAIRS, FLOOD_PAIR)
    alone, all_found = Alone(), []
    fixed: dict[str, list[SpanResult]] = {}
    with _workers(script, (*((PODS, pair) for pair in COPY_PAIRS), (MIXED, FLOOD_PAIR))) as workers:
        _alone(script, workers, alone, pairs, BEST)
        for pair in COPY_PAIRS:
            all_found.append(_in_turn(script, workers, pair, (TWO_ONE,), BEST))
            _say_all(script, all_found[-1], alone)
        _alone(script, workers, alone, pairs, BEST)
        # Under fixed-share every pod needs a quota, one that rests too.
        _share(script, TWO_ONE, (PODS[1], PODS[0]))
        _share(script, replace(TWO_ONE, policy=FIXED), (PODS[1], PODS[0]))
        for pair in COPY_PAIRS:
            asked = {PODS[0]: pair.first}
            settle_s = [BEST.settle + (0 if number else BEST.learn) for number in range(_repeats(script))]
            fixed[pair.first] = [workers.take(asked, each, BEST.span) for each in settle_s]
        _share(script, TWO_ONE, PODS)
        flood = _in_turn(script, workers, FLOOD_PAIR, (BESIDE,), BEST, MIXED)
        _say_all(script, flood, alone)
        _alone(script, workers, alone, pairs, BEST)
    cases = [*((found, MPS_2_1) for found in all_found), (flood, MPS_FREE)]
    _by_mps(script, cases, BEST, alone)
    _keep(script, "real_copies", [*all_found, flood], alone)
    script.plots += [_plot("programs that copy", all_found, TWO_ONE, alone), _p99_plot(flood, BESIDE, alone)]
    late = [span.processes[0].p99_ms / alone.p99_ms(FLOOD_PAIR.first) for span in flood.shared[BESIDE]]
    note = f"{FLOOD_PAIR.first} (online) beside {FLOOD_PAIR.second}: p99 of a step over that alone"
    return [
        *_two_one("copy", all_found, TWO_ONE, alone, (1.9, 2.1), 0.95),
        *_fixed_figures(script, fixed, alone),
        median("copy_online_p99_over_alone", late, note=note),
    ]


def _fixed_figures(script: Script, fixed: Mapping[str, Sequence[SpanResult]], alone: Alone) -> list[Figure]:
    each = {}
    for program, spans in fixed.items():
        values = [span.processes[0].speed / alone.speed(program) for span in spans]
        script.say(f"{program}, fixed-share 33 alone: over alone {listed(values)}")
        each[program] = median(f"copy_fixed_33_{program.replace('-', '_')}", values)
    values = [figure.value for figure in each.values()]
    note = f"fixed-share, 33 % and no one else: speed over alone, the farthest from a third of {', '.join(each)}"
    together = median("copy_fixed_33", values, *between(0.31, 0.36), note=note, pick=lambda all_: farthest(all_, 0.333))
    return [together, *each.values()]


def processes(script: Script) -> list[Figure]:
    """Measure a service over one offline pod of several processes, as ``online_latency.py`` does, and judge it."""
    _need_card(script)
    limits: dict[str, Asked] = {
        "online_processes_p99_added_us": at_most(400, " µs"),
        "online_processes_kept": at_least(0.85),
    }
    figures = []
    for found in online_latency.processes(script):
        name = found.name.replace("online_processes", "offline_processes")
        figures.append(median(name, found.repeats, *limits.get(found.name, NOTHING), note=found.note))
    return figures


SECTIONS = {
    "real_gappy": gappy,
    "real_full": full,
    "real_online": online,
    "real_best_effort": best_effort,
    "real_copies": copies,
    "real_processes": processes,
}

if __name__ == "__main__":
    sys.exit(run("real", SECTIONS, __doc__ or "", apart=list(SECTIONS)))
