"""One trial: what a way to take turns gave each pod in a tenth of a second or more, and its score.

Pure arithmetic on context switches and GPU time. ``qgpu.sched.slice_tuner`` decides what to try and what to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from qgpu.model import Sharing
from qgpu.model.hardware_traits import HardwareTraits
from qgpu.sched.gpu_usage import GpuUse, RoundEntry

#: A pod ends its turns early if it uses less than _EARLY of them. It exhausts them if it uses at least _EXHAUSTED.
_EARLY, _EXHAUSTED = 0.97, 0.985
#: A trial may begin and end inside a turn, so it can miss up to this many turns' worth of time.
_CUT_OFF = 1.02

#: A pod that always waits gains from a shorter round. A pod that gains less than this part of that is satisfied.
#: The comparison needs at least MIN_TURNS turns.
_GAINED, MIN_TURNS = 0.4, 6

#: A step that lasts this part of what it lasted before is not cut by a slice.
_UNCUT = 0.9

#: A pod that runs step after step has no turn longer than this many times the mean. Measured on an H200: 1.00 to 1.05
#: for CUDA graphs, trainings and copies, 1.25 to 2.5 for programs launched kernel by kernel.
_EVEN = 1.15

#: A pod that rests and has this part of what it had in any other way has all it asks for: trials differ by as much.
_SERVED = 0.95

#: What a switch takes of a pod's turn, at least and at most, over ``switched_ns``, its mean. Measured on an H200: 75 µs
#: where the pod yields the card, 157 µs where it is preempted.
_LEAST_SWITCH, _MOST_SWITCH = 0.75, 2.0

#: A pod that has a turn in less than this part of the rounds rests in between.
_PRESENT = 0.75


class Trial(NamedTuple):
    """What one way to take turns gave each pod."""

    sharing: Sharing
    #: Work done, as a part of the measured time: GPU time without context switches. The best estimate.
    rates: Mapping[str, float]
    #: How long a pod's turns in one round last together: one per busy TSG, each of mean length, in ns.
    turns_ns: Mapping[str, float]
    #: How many turns each pod had.
    starts: Mapping[str, int] = MappingProxyType({})
    #: Pods whose turns differ much in length though no slice cuts them: they run what the host has queued meanwhile,
    #: not step after step.
    uneven: frozenset[str] = frozenset()
    #: Pods that ended turns early.
    early: frozenset[str] = frozenset()
    #: The part of the time that context switches took.
    switching: float = 0.0
    #: Whether every pod that does not rest used its slices to the end.
    slices_exhausted: bool = False
    #: The smallest part of its slices that any pod used, of those that do not rest.
    min_slice_use: float = 0.0
    #: Pods that often had nothing to run when their turn came.
    resting: frozenset[str] = frozenset()
    watched_ns: int = 1
    #: Pods whose steps all fit into one slice, so that none was cut.
    fits_slice: frozenset[str] = frozenset()
    #: The part of the time in which kernels ran or pods were switched, by NVML.
    used: float = 1.0
    #: The part of the reserved time in which the pods that it is reserved for ran kernels.
    reserved_use: float = 1.0
    #: What the records of context switches allow for each pod's work, least and most, as parts of the measured time.
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    #: How many GPFIFO entries the card took from each pod, as far as known.
    entries: Mapping[str, int] = MappingProxyType({})
    #: The work by records alone.
    by_records: Mapping[str, float] = MappingProxyType({})
    #: Pods whose ``rates`` follow their entries (``entry_cost.py``).
    counted: frozenset[str] = frozenset()

    @property
    def gappy(self) -> frozenset[str]:
        """Name the pods that leave gaps: they end turns early, or rest."""
        return self.early | self.resting


def observe(
    sharing: Sharing,
    uses: Mapping[str, GpuUse],
    pods: Mapping[str, RoundEntry],
    watched_ns: int,
    used: float,
    known_fits: frozenset[str],
    known_gappy: frozenset[str],
    hardware: HardwareTraits,
    *,
    long: bool,
    used_by_slices: float = 1.0,
) -> Trial:
    """Return the trial that pods' GPU use over ``watched_ns`` amounts to, with turns taken as ``sharing`` says.

    ``used`` is the part of the time in which kernels ran; only ways with gates need it. ``known_fits`` names pods whose
    steps are known to fit into their slices, ``known_gappy`` those that leave gaps with slices, and ``used_by_slices``
    is the part of the time in which kernels ran with slices. A ``long`` round shows too few turns to tell which pods
    rest.
    """
    whole_ns = max(1, watched_ns)
    starts = {name: use.starts for name, use in uses.items()}
    entries = {name: use.entries for name, use in uses.items() if use.entries is not None}
    turns_ns = {name: pods[name].busy_tsgs * use.run_ns / max(1, use.starts) for name, use in uses.items()}
    if sharing.reserved:
        idle = max(0.0, 1 - used - (1 - sharing.reserved) * (1 - used_by_slices))
        rates = _rates_beside_reserved(uses, sharing.ungated, whole_ns, idle, hardware)
        return Trial(
            sharing,
            rates,
            turns_ns,
            starts,
            watched_ns=whole_ns,
            reserved_use=max(0.0, 1 - idle / sharing.reserved),
            bounds=_bounds(uses, pods, whole_ns, dict.fromkeys(sharing.ungated, idle), hardware),
            entries=entries,
            by_records=rates,
        )
    if sharing.by_gate:
        rates = _gated_rates(uses, pods, whole_ns, used, known_gappy, hardware)
        bounds = _bounds(uses, pods, whole_ns, dict.fromkeys(uses, 1.0), hardware)
        return Trial(
            sharing, rates, turns_ns, starts, watched_ns=whole_ns, bounds=bounds, entries=entries, by_records=rates
        )
    early, uneven, fits_slice, slices_exhausted, min_slice_use = [], [], list[str](), True, 1.0
    resting = frozenset() if long else _resting(uses, pods, turns_ns, watched_ns, hardware)
    for name, use in uses.items():
        part = pods[name].part
        assert part is not None
        full_ns = hardware.turn_ns(part.timeslice_us)
        left_ns = use.starts * full_ns - use.run_ns
        if is_early(use, pods[name], hardware):
            early.append(name)
        if name not in resting:
            slices_exhausted = slices_exhausted and left_ns <= max(full_ns, (1 - _EXHAUSTED) * use.starts * full_ns)
            min_slice_use = min(min_slice_use, use.run_ns / max(1, use.starts * full_ns))
        uncut = 0 < use.longest_ns < _EARLY * full_ns
        if uncut and use.longest_ns > _EVEN * use.run_ns / max(1, use.starts):
            uneven.append(name)
        if uncut or (name in known_fits and use.run_ns < _EARLY * use.starts * full_ns):
            fits_slice.append(name)
    rates = _worked(uses, whole_ns, hardware)
    switching = sum(starts.values()) * (hardware.switched_ns + hardware.gap_ns) / whole_ns
    return Trial(
        sharing,
        rates,
        turns_ns,
        starts,
        frozenset(uneven),
        frozenset(early),
        switching,
        slices_exhausted,
        min_slice_use,
        resting,
        whole_ns,
        frozenset(fits_slice),
        used or 1.0,
        bounds=_bounds(uses, pods, whole_ns, dict.fromkeys(uses, 1 - (used or 1.0)), hardware),
        entries=entries,
        by_records=rates,
    )


def _bounds(
    uses: Mapping[str, GpuUse],
    pods: Mapping[str, RoundEntry],
    whole_ns: int,
    idle: Mapping[str, float],
    hardware: HardwareTraits,
) -> dict[str, tuple[float, float]]:
    """Return the least and the most work of each pod that records allow, as parts of the time.

    ``idle`` is the largest part of the time in which a pod may have been on the card without work.
    """
    found = {}
    for name, use in uses.items():
        part = pods[name].part
        switched_ns = use.starts * hardware.switched_ns
        alone = part is not None and part.windows is not None
        least_ns = use.run_ns - switched_ns * _MOST_SWITCH - idle.get(name, 0.0) * whole_ns
        most_ns = use.run_ns - (0 if alone else switched_ns * _LEAST_SWITCH)
        found[name] = max(0.0, least_ns / whole_ns), max(0.0, most_ns / whole_ns)
    return found


def _worked(uses: Mapping[str, GpuUse], whole_ns: int, hardware: HardwareTraits) -> dict[str, float]:
    """Return the work of pods in turns by timeslices: the time that they ran, less their switches."""
    return {name: max(0.0, use.run_ns - use.starts * hardware.switched_ns) / whole_ns for name, use in uses.items()}


def _rates_beside_reserved(
    uses: Mapping[str, GpuUse], owners: AbstractSet[str], whole_ns: int, idle: float, hardware: HardwareTraits
) -> dict[str, float]:
    """Return the work of pods where time is reserved for ``owners``, who alone left the card idle for a part of it."""
    rates = _worked(uses, whole_ns, hardware)
    theirs = sum(rates[name] for name in owners & rates.keys())
    worked = max(0.0, 1 - idle / theirs) if theirs else 1.0
    return {name: rate * worked if name in owners else rate for name, rate in rates.items()}


def _gated_rates(
    uses: Mapping[str, GpuUse],
    pods: Mapping[str, RoundEntry],
    whole_ns: int,
    used: float,
    known_gappy: frozenset[str],
    hardware: HardwareTraits,
) -> dict[str, float]:
    """Estimate the work of pods in turns by gate, where a context counts as running while it idles.

    A pod that uses its slices up has no gaps. So the time in which a context was on the card and no kernel ran is taken
    off the others, in the ratio of their turns. A pod without a window of its own runs in slices beside the others: it
    yields the card when it has nothing to run and another pod has, so no idle time is taken off it, and its switches
    are no work. Beside a pod with gaps this overrates it.
    """
    rates = {name: use.run_ns / whole_ns for name, use in uses.items()}
    whole, gappy = sum(rates.values()), set(known_gappy & rates.keys())
    for name, use in uses.items():
        part = pods[name].part
        if part is not None and part.windows is None:
            rates[name] = max(0.0, use.run_ns - use.starts * hardware.switched_ns) / whole_ns
            gappy.discard(name)
    if (idle := whole - used) <= 0:
        return rates
    theirs = sum(rates[name] for name in gappy)
    if theirs <= idle:
        return {name: rate * used / whole for name, rate in rates.items()}
    return {name: rate * (1 - idle / theirs) if name in gappy else rate for name, rate in rates.items()}


def is_early(use: GpuUse, entry: RoundEntry, hardware: HardwareTraits) -> bool:
    """Tell whether a pod ended turns early. A measurement that begins or ends inside a turn does not count as that."""
    assert entry.part is not None
    full_ns = hardware.turn_ns(entry.part.timeslice_us)
    return use.run_ns < _EARLY * use.starts * full_ns and use.starts * full_ns - use.run_ns > _CUT_OFF * full_ns


def _resting(
    uses: Mapping[str, GpuUse],
    pods: Mapping[str, RoundEntry],
    turns_ns: Mapping[str, float],
    watched_ns: int,
    hardware: HardwareTraits,
) -> frozenset[str]:
    """Name the pods that had clearly fewer turns than there were rounds of the measured turns."""
    round_ns = 0.0
    for name, turn in turns_ns.items():
        part, tsgs = pods[name].part, pods[name].busy_tsgs
        assert part is not None
        round_ns += min(turn, tsgs * hardware.turn_ns(part.timeslice_us)) + tsgs * hardware.gap_ns
    return frozenset(
        name
        for name, use in uses.items()
        if use.starts / max(1, pods[name].busy_tsgs) * round_ns < _PRESENT * watched_ns
        and turns_ns[name] < round_ns / 2
    )


def short_of_share(trial: Trial, weights: Mapping[str, int], least: float) -> frozenset[str]:
    """Name the pods that end turns early and have less than ``least`` of their share of the work by weight."""
    done, whole = sum(trial.rates.values()), sum(weights.values())
    return frozenset(name for name in trial.early if trial.rates[name] < least * done * weights[name] / whole)


def satisfied_pods(trials: Sequence[Trial], hardware: HardwareTraits) -> frozenset[str]:
    """Name the pods that gained little when others' turns became shorter: they have all they ask for.

    If others' turns become shorter by some time, a pod that always waits starts its next turn earlier by all of it.
    """
    slices = [each for each in trials if not each.sharing.by_gate]
    found: set[str] = set()
    for before, after in pairwise(slices):
        if before.turns_ns.keys() != after.turns_ns.keys():
            continue
        for name in after.rates:
            others_before, others_after = (
                sum(turn + hardware.gap_ns for other, turn in each.turns_ns.items() if other != name)
                for each in (before, after)
            )
            told = min(before.starts[name], after.starts[name]) >= MIN_TURNS
            if others_after > 0.75 * others_before or name not in before.early or not told:
                continue
            step_ns = max(1.0, before.turns_ns[name])
            if after.turns_ns[name] < _UNCUT * step_ns:
                continue  # a slice cuts its steps, so it gains less
            if_waiting = before.rates[name] * (step_ns + others_before) / (step_ns + others_after)
            gain = if_waiting - before.rates[name]
            if gain > 0.02 and after.rates[name] - before.rates[name] < _GAINED * gain:
                found.add(name)
    return frozenset(found)


def guaranteed(trial: Trial, pods: Mapping[str, RoundEntry]) -> frozenset[str]:
    """Name the pods with a guaranteed share: those with a quota, or all pods if none has a quota."""
    return frozenset(name for name in trial.rates if pods[name].grant.cores is not None) or frozenset(trial.rates)


def dues(pods: Mapping[str, RoundEntry], done: float, available: float) -> dict[str, float]:
    """Return what is due to each pod of the work ``done`` in the ``available`` time, both in one unit.

    A pod with a quota is due its weight's part of the time. Pods without one divide the rest by weight, so they bear
    what switches and gates took.
    """
    whole = sum(entry.weight for entry in pods.values())
    with_quota = sum(entry.weight for entry in pods.values() if entry.grant.cores is not None)
    theirs = min(done, available * with_quota / whole) if with_quota < whole else done
    return {
        name: theirs * entry.weight / with_quota
        if entry.grant.cores is not None
        else (done - theirs) * entry.weight / (whole - with_quota)
        for name, entry in pods.items()
    }


def score(trial: Trial, every: Sequence[Trial], pods: Mapping[str, RoundEntry]) -> float:
    """Return the score of a trial: the least satisfied pod's part of its due, squared, times the work of all pods."""
    return satisfaction(trial, every, pods) ** 2 * sum(trial.rates.values())


def satisfaction(trial: Trial, every: Sequence[Trial], pods: Mapping[str, RoundEntry]) -> float:
    """Return what part of its due the least satisfied pod has, 1 at most.

    If any pod has a quota, pods without one have no guarantee. With slices by weight, a pod that exhausts its slices
    counts as having one turn more, because a trial may begin or end within one.
    """
    by_weight = not trial.sharing.by_gate and not trial.sharing.equal
    least, parts = 1.0, dues(pods, sum(trial.rates.values()), 1.0)
    for name in guaranteed(trial, pods):
        rate, due = trial.rates[name], min(parts[name], max(each.rates.get(name, 0.0) for each in every))
        if by_weight and name not in trial.early:
            rate += trial.turns_ns[name] / trial.watched_ns
        if due > 0 and not (name in trial.resting and _is_served(name, trial, every, parts[name])):
            least = min(least, rate / due)
    return least


def _is_served(name: str, trial: Trial, every: Sequence[Trial], part: float) -> bool:
    """Tell whether a pod that rests has about as much as in any other trial, or its ``part`` of the card.

    Each of the trials may have counted a step too few or too many.
    """
    slices = [each for each in every if name in each.rates and not each.sharing.by_gate]
    step_ns = max((each.turns_ns[name] for each in slices), default=0.0)
    most = max((each.rates[name] - step_ns / each.watched_ns for each in slices), default=0.0)
    return trial.rates[name] + step_ns / trial.watched_ns >= _SERVED * min(part, most)
