"""Reserved time: a part of each period in which pods that are owed work have the card to themselves.

A pod that waits for its own work after each short step pays two switches a step beside a pod that always has work, and
no slice is short enough to help. In reserved time it runs at its full speed. In the rest of the period all pods take
turns by timeslices, so the others' gaps are filled. ``slice_tuner.py`` decides when to try.

Pure arithmetic on trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from qgpu.model import Sharing
from qgpu.sched.gpu_usage import RoundEntry
from qgpu.sched.trial import Trial, dues, guaranteed, satisfaction
from qgpu.sched.tuning import Tuning

#: A pod is owed time of its own if slices give it less than this part of its due.
_OWED = 0.85

#: The least and the most time that is reserved, as parts of a period. In less, NVML does not show how much it is used.
_LEAST, _MOST = 0.1, 0.9

#: More time is reserved if a pod still has less than _SERVED of its due, and _MORE of a period more would help.
_SERVED, _MORE = 0.95, 0.05

#: Less use of reserved time than this is not told from none.
_LEAST_USE = 0.1

#: Reserved time stays if it is _WORTH times as good as the best round, if its owners do _FASTER times their work, and
#: if all pods together are at least _AS_FAST times as fast.
_WORTH, _FASTER, _AS_FAST = 1.03, 1.2, 0.9


def worth_a_trial(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry]) -> Sharing | None:
    """Return the best round with as much time reserved as the pods that are owed work need; None for none.

    Pods that rest or have all that they ask for wait for nothing. They run at any time.
    """
    waiting = best.rates.keys() - now.satisfied - best.resting
    short = {name: due for name, due in _dues(best, pods).items() if name in waiting and best.rates[name] < _OWED * due}
    others = waiting - short.keys()
    if not short or not others:
        return None
    needed = sum((due - best.rates[name]) / (1 - best.rates[name]) for name, due in short.items())
    reserved = _bounded(needed, now, best, others, pods)
    if reserved < _LEAST:
        return None
    return replace(best.sharing, by_gate=True, ungated=frozenset(best.rates.keys() - others), reserved=reserved)


def more(now: Tuning, trial: Trial, best: Trial, pods: Mapping[str, RoundEntry]) -> Sharing | None:
    """Return ``trial`` with more time reserved if a pod still waits; None for no more.

    The trial shows how fast a pod is in reserved time, and so how much of it the pod needs.
    """
    reserved, needed = trial.sharing.reserved, 0.0
    for name, due in _dues(best, pods).items():
        if name not in _owners(now, trial, best):
            continue
        beside = best.rates[name]
        alone = (trial.rates[name] - (1 - reserved) * beside) / reserved
        if alone > beside and trial.rates[name] < _SERVED * min(due, alone):
            needed += (min(due, alone) - beside) / (alone - beside)
    longer = _bounded(needed, now, best, best.rates.keys() - trial.sharing.ungated, pods)
    return replace(trial.sharing, reserved=longer) if longer >= reserved + _MORE else None


def pays(trial: Trial, best: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether reserved time is better than ``best``, the best round."""
    if trial.reserved_use < _LEAST_USE:
        return False
    owners = _owners(now, trial, best) & guaranteed(best, pods)
    faster = sum(trial.rates[name] for name in owners) >= _FASTER * sum(best.rates[name] for name in owners)
    return faster and worth(trial, trial, now, pods) >= _WORTH * worth(best, trial, now, pods) and keeps(trial, best)


def keeps(trial: Trial, best: Trial) -> bool:
    """Tell whether pods together are about as fast with reserved time as in ``best``, the best round."""
    return _speeds(trial, trial) >= _AS_FAST * _speeds(best, trial)


def worth(trial: Trial, reserved: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> float:
    """Return the score of a trial, with the speeds of all pods in place of their work.

    A pod that waits between its steps works little however fast it is, so its work says little of its speed.
    """
    return satisfaction(trial, now.trials, pods) ** 2 * _speeds(trial, reserved)


def _speeds(trial: Trial, reserved: Trial) -> float:
    """Return the sum of pods' speeds, as parts of what each does alone; ``reserved`` shows what owners do alone."""
    owners = reserved.sharing.ungated
    return sum(
        rate / (max(_LEAST_USE, reserved.reserved_use) if name in owners else 1.0) for name, rate in trial.rates.items()
    )


def _owners(now: Tuning, trial: Trial, best: Trial) -> AbstractSet[str]:
    """Name the pods that time is reserved for, without those that need none of it."""
    return (trial.sharing.ungated & best.rates.keys() & trial.rates.keys()) - now.satisfied - best.resting


def _dues(best: Trial, pods: Mapping[str, RoundEntry]) -> dict[str, float]:
    """Return the guaranteed part of the card of each pod that has one."""
    parts = dues(pods, sum(best.rates.values()), 1.0)
    quotas = {name: pods[name].grant.cores for name in guaranteed(best, pods)}
    return {name: parts[name] if cores is None else cores / 100 for name, cores in quotas.items()}


def _bounded(
    needed: float, now: Tuning, best: Trial, others: AbstractSet[str], pods: Mapping[str, RoundEntry]
) -> float:
    """Return how much of a period may be reserved, in whole per cent.

    At most the part of its owners by weight: who leaves gaps in it pays for them. And the ``others`` keep their dues.
    Their switches count as theirs here, because most of these end with reserved time.
    """
    weight = {name: entry.weight for name, entry in pods.items()}
    owned = 1 - sum(weight[name] for name in others) / sum(weight.values())
    spared = [
        1 - due / max(1e-9, best.rates[name] + best.starts[name] * now.hardware.switched_ns / best.watched_ns)
        for name, due in _dues(best, pods).items()
        if name in others
    ]
    return round(max(0.0, min(needed, owned, _MOST, *spared)), 2)
