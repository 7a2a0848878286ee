"""What is known of the busy pods of one class that take turns together, and how they take turns now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from qgpu.model import NS_PER_MS, NS_PER_S, PodClass, Sharing
from qgpu.model.hardware_traits import OTHER, HardwareTraits
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.trial import Trial

#: The longest slice of pods that have not been measured yet: about the driver's own timeslice.
START_SLICE_NS = 2 * NS_PER_MS

#: An operator who changes quotas sees them at once, and for this long no trial disturbs them.
KEPT_NS = 10 * NS_PER_S


class Tuning(NamedTuple):
    """What is known of a set of contending pods, and how they take turns now."""

    sharing: Sharing
    trials: tuple[Trial, ...] = ()
    #: Ways the tuner asked for and the policy did not plan.
    rejected: tuple[Sharing, ...] = ()
    settled: bool = False
    #: The way that was settled on last.
    last_settled: Sharing | None = None
    #: A trial was interrupted. The tuner resumes once there is time for a whole one.
    unfinished: bool = False
    uses: Mapping[str, GpuUse] = MappingProxyType({})
    #: How long this way has been measured, less the time of other classes.
    watched_ns: int = 0
    passed_ns: int = 0
    utilization: float = 0.0
    utilization_ns: int = 0
    #: Pods that get all they ask for under timeslices.
    satisfied: frozenset[str] = frozenset()
    #: Pods whose steps fit into one slice. The policy makes their slices somewhat longer, so that no step is cut.
    fits_slice: frozenset[str] = frozenset()
    #: Work done beyond (positive) or short of (negative) each pod's part under timeslices, in ns; bounded.
    debts_ns: Mapping[str, float] = MappingProxyType({})
    #: How long each pod's turns by slices were when a trial of gates failed, and when gates last failed. No lengths if
    #: gates had worked before.
    gates_failed: Mapping[str, float] = MappingProxyType({})
    gates_failed_ns: int | None = None
    #: When the first of the trials was made.
    tried_ns: int = 0
    #: For how many measurements in a row gates have left the card idle.
    idle_by_gate: int = 0
    #: For how long pods have not filled the card while time is reserved.
    unused_ns: int = 0
    #: Retries because pods' behaviour changed or a pod fell short: how many lately, and when the last was.
    retries: int = 0
    retried_ns: int = 0
    #: Retries because a pod stayed underserved: how many lately, and since when one is underserved now.
    underserved_retries: int = 0
    underserved_since_ns: int = 0
    #: Under other weights, this way let the pods do this part of the card's work; 0 once it was tried under these.
    expected: float = 0.0
    #: Until then a way that was kept after a change of weights stays as it is; 0 for a way that these weights led to.
    kept_until_ns: int = 0
    #: What was measured of the card's model.
    hardware: HardwareTraits = OTHER

    def last_trial(self) -> Trial | None:
        """Return the last trial of the way that pods take turns now."""
        return next((each for each in reversed(self.trials) if each.sharing == self.sharing), None)

    def at(self, sharing: Sharing) -> Tuning:
        """Start to measure another way."""
        return self._replace(
            sharing=sharing,
            uses={},
            watched_ns=0,
            passed_ns=0,
            utilization=0.0,
            utilization_ns=0,
            unused_ns=0,
            settled=False,
            last_settled=self.sharing if self.settled else self.last_settled,
            fits_slice=frozenset(),
            debts_ns=self.debts_ns if sharing == self.sharing else MappingProxyType({}),
            expected=self.expected if sharing == self.sharing else 0.0,
        )

    def restart(self) -> Tuning:
        """Start to measure the same way again."""
        return self.at(self.sharing)._replace(settled=self.settled, fits_slice=self.fits_slice)

    def settle_on(self, trial: Trial) -> Tuning:
        """Keep to the way of a trial."""
        return self.at(trial.sharing)._replace(settled=True, fits_slice=trial.fits_slice, expected=0.0)

    def afresh(self) -> Tuning:
        """Forget what was tried, because it is old or pods do something else now."""
        return self._replace(trials=(), satisfied=frozenset(), kept_until_ns=0)

    def keep(self, trial: Trial, now_ns: int) -> Tuning:
        """Keep to a way that other weights had settled on, and look for a better one later."""
        return self.settle_on(trial)._replace(kept_until_ns=now_ns + KEPT_NS, tried_ns=now_ns)

    def with_other_weights(self) -> Tuning | None:
        """Return where to begin when only the pods' weights change: with the same way, to be tried first.

        None if no way was settled on, or one that does not follow the weights.
        """
        found = self.last_trial()
        if found is None or not self.settled or self.sharing.equal or self.sharing.reserved:
            return None
        return Tuning(self.sharing, expected=sum((found.by_records or found.rates).values()), hardware=self.hardware)


def begin(weights: Sequence[int], pod_class: PodClass = PodClass.OFFLINE, hardware: HardwareTraits = OTHER) -> Tuning:
    """Return the tuning of pods that have not been measured together: their first slices are short."""
    return Tuning(_start(weights, pod_class), hardware=hardware)


def first_round(pods: Mapping[str, RoundEntry]) -> Sharing:
    """Return the round that busy pods start with."""
    pod_class = next(iter(pods.values())).grant.pod_class
    return _start([entry.weight for entry in pods.values()], pod_class)


def _start(weights: Sequence[int], pod_class: PodClass) -> Sharing:
    """Return the first round. The longest slice is START_SLICE_NS; among online pods the mean slice is.

    Online pods get longer slices because every extra cut of a step adds latency, and they never take turns by gate.
    """
    if pod_class is PodClass.ONLINE:
        return Sharing(round_ns=START_SLICE_NS * len(weights))
    return Sharing(round_ns=START_SLICE_NS * sum(weights) // max(weights))
