"""What GPFIFO entries show of pods' work: each costs a pod about the same GPU time, however pods take turns.

Records of context switches show a pod's work well while its turns are long. Where a turn is about as long as a switch,
or a context idles on the card, they only give bounds. The entries that the card took show how fast the pod is in one
way as compared with another, and the bounds of all trials together what an entry costs. A pod can write any GP_GET, and
a program may have phases: so a rate never leaves its bounds, and without a cost that all trials allow, records decide.

Pure arithmetic on trials.
"""

from __future__ import annotations

from collections.abc import Sequence

from qgpu.sched.trial import Trial

#: A trial may hold one entry too many or too few.
_SLACK = 1

#: From this many entries on, one more or less hardly changes a rate.
_ENOUGH_ENTRIES = 20

#: Bounds of the cost agree if none is this many times another's. A program runs faster or slower with the card's caches
#: and clocks.
_AGREE = 1.15


def by_entries(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the trials with the rates that entries show, where they show more than records."""
    rates = [{**trial.rates, **trial.by_records} for trial in trials]
    counted: list[set[str]] = [set() for _ in trials]
    for name in {name for trial in trials for name in trial.entries}:
        told = [at for at, trial in enumerate(trials) if name in trial.entries]
        cost_ns = _cost_ns(name, [trials[at] for at in told])
        if cost_ns is None:
            continue
        for at in told:
            count, whole_ns, bounds = trials[at].entries[name], trials[at].watched_ns, trials[at].bounds[name]
            least, most = (cost_ns * (count + slack) / whole_ns for slack in (-_SLACK, _SLACK))
            rates[at][name] = _clamp(_clamp(rates[at][name], least, most), *bounds)
            if count >= _ENOUGH_ENTRIES:
                counted[at].add(name)
    return tuple(
        trial._replace(rates=found, counted=frozenset(names))
        for trial, found, names in zip(trials, rates, counted, strict=True)
    )


def alike(trial: Trial, other: Trial) -> Trial:
    """Return ``trial`` with each rate from the source that ``other`` uses: records, unless both counted entries."""
    followed = trial.counted & other.counted
    rates = {name: rate if name in followed else trial.by_records.get(name, rate) for name, rate in trial.rates.items()}
    return trial._replace(rates=rates)


def _cost_ns(name: str, trials: Sequence[Trial]) -> float | None:
    """Return the GPU time that one entry of a pod takes, in ns; None if the trials do not agree on one.

    The trial with the tightest bounds gives the cost; the bounds of all trials limit it.
    """
    told = [(each.entries[name], each.watched_ns, *each.bounds[name], each.by_records[name]) for each in trials]
    several = [each for each in told if each[0] > _SLACK]
    if not several:
        return None
    least_ns = max(least * whole_ns / (count + _SLACK) for count, whole_ns, least, _, _ in told)
    most_ns = min(most * whole_ns / (count - _SLACK) for count, whole_ns, _, most, _ in several)
    if least_ns > _AGREE * most_ns or most_ns <= 0:
        return None

    def doubt(each: tuple[int, int, float, float, float]) -> float:
        count, _, least, most, _ = each
        return 2 * _SLACK / count - least / max(1e-9, most)

    count, whole_ns, _, _, rate = min(several, key=doubt)
    return _clamp(rate * whole_ns / count, least_ns, most_ns)


def _clamp(value: float, least: float, most: float) -> float:
    return min(most, max(least, value))
