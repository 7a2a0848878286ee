"""What the loop remembers: samples folded into GPU time used, debt, and which pods were busy lately.

A pure fold: ``advance`` and ``planned`` return a new ledger. The ledger decides nothing; policies read it through a
snapshot. ``qgpu.sched.accounting`` computes the debts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from qgpu.model import (
    FLOOR_SPAN_NS,
    FLOOR_TIMES,
    NS_PER_MS,
    NS_PER_S,
    Plan,
    Pod,
    PodClass,
    PodSample,
    Sample,
    Sharing,
    Snapshot,
    Tsg,
)
from qgpu.model.hardware_traits import traits
from qgpu.sched import slice_tuner
from qgpu.sched.accounting import settle
from qgpu.sched.gpu_usage import NOTHING, GpuUse, RoundEntry, known_sum
from qgpu.sched.slice_tuner import Tuning

#: A TSG counts as busy until its gate has been open for this long without a run.
IDLE_AFTER_NS = 500 * NS_PER_MS

#: A pod whose TSGs all rested for this long loses its credit, as if it was new.
FORGET_AFTER_NS = 2_000 * NS_PER_MS

#: A pod is starting until it has run for STARTED_NS since it has TSGs, but for STARTING_NS at most. Policies make room
#: for it meanwhile.
STARTED_NS = 5 * NS_PER_MS
STARTING_NS = 3_000 * NS_PER_MS
#: At most this much of each turn counts towards STARTED_NS, because an idle context that stays on the card is charged
#: for its idle time.
STARTING_TURN_NS = NS_PER_MS // 2

#: A pod may spend START_BUDGET_NS of GPU time on starts outside its own windows, and earns back START_REFILL of the
#: time that passes; all pods of a card together STARTS_TOGETHER times as much, those that have left included. Each turn
#: costs BUDGETED_TURN_NS at most, the length of a slice beside a starting pod: an idle context that nobody waits for
#: stays on the card longer.
START_BUDGET_NS = 10 * NS_PER_MS
START_REFILL = 0.005
STARTS_TOGETHER = 4
BUDGETED_TURN_NS = 2 * NS_PER_MS

#: A pod is fragmented when it ends more than FRAGMENTED turns a second early, on average over FRAGMENTED_OVER_NS:
#: switches then cost more than short waits save. It stays so until the rate falls to UNFRAGMENTED.
FRAGMENTED, UNFRAGMENTED = 600.0, 100.0
FRAGMENTED_OVER_NS = 1_000 * NS_PER_MS

#: A card is idle when NVML saw no kernel for this long and for two periods. A context on its engine runs nothing then.
CARD_IDLE_NS = 400 * NS_PER_MS

#: Of how many mixes of busy pods the ledger keeps the tuning.
_MIXES = 16

#: A round is ragged if it differs from a whole number of periods by more than this part of a period.
_RAGGED = 0.02


class Account(NamedTuple):
    """One pod: its GPU time since it was admitted, what it did in this round, and its debt after the last round."""

    last: PodSample
    used_ns: int = 0
    #: For each TSG the time with an open gate since it last ran, in ns; bounded.
    tsgs: Mapping[str, int] = MappingProxyType({})
    round: GpuUse = NOTHING
    #: GPU time beyond (positive) or short of (negative) what plans aimed at.
    debt_ns: int = 0
    #: How many of its TSGs had work lately.
    busy_tsgs: int = 0
    #: How long it has had TSGs, and how long those ran, in ns.
    here_ns: int = 0
    ran_ns: int = 0
    #: GPU time that it spent on starts outside its own windows and has not earned back yet, in ns.
    start_spent_ns: int = 0
    #: How many turns per second it ended before its slice did, lately.
    ended_early: float = 0.0
    fragmented: bool = False

    @property
    def busy(self) -> bool:
        """Tell whether any of its TSGs had work lately."""
        return self.busy_tsgs > 0

    @property
    def starting(self) -> bool:
        """Tell whether its processes are just starting and have hardly run."""
        return bool(self.tsgs) and self.ran_ns < STARTED_NS and self.here_ns < STARTING_NS

    def advance(
        self, sample: PodSample, elapsed_ns: int, slice_ns: int = 0, *, idle: bool = False, ungated: bool = False
    ) -> Account:
        """Fold in one sample of ``elapsed_ns``, in which a whole turn lasted ``slice_ns`` (0: unknown).

        On an ``idle`` card its GPU time does not count as use. An ``ungated`` pod may run outside of its own windows.
        """
        open_ns = max(0, elapsed_ns - sample.gated_ns)
        run_ns, starts, longest_ns, tsgs, busy_tsgs, rested = sample.ended_ns, sample.ended_starts, 0, {}, 0, True
        for tsg in sample.tsgs:
            idle_ns = 0
            if tsg.run_ns or tsg.starts:
                run_ns += tsg.run_ns
                starts += tsg.starts
                longest_ns = max(longest_ns, tsg.longest_ns)
            else:
                idle_ns = min(FORGET_AFTER_NS, self.tsgs.get(tsg.tsg, FORGET_AFTER_NS) + open_ns)
            tsgs[tsg.tsg] = idle_ns
            busy_tsgs += idle_ns < IDLE_AFTER_NS
            rested = rested and idle_ns >= FORGET_AFTER_NS
        debt_ns = self.debt_ns
        if sample.grant is not self.last.grant and sample.grant != self.last.grant:
            debt_ns = 0
        if rested:
            # Keep its debt. Otherwise a pod could end its processes and start them again to lose it.
            debt_ns = max(0, debt_ns)
        before = self.round
        use = GpuUse(
            before.run_ns + (0 if idle else run_ns),
            before.starts + starts,
            before.open_ns + open_ns,
            before.passed_ns + elapsed_ns,
            max(before.longest_ns, longest_ns),
            before.ungated_ns + run_ns * ungated,
            known_sum(before.entries, sample.gpfifo_entries),
        )
        counted_ns = min(run_ns, starts * STARTING_TURN_NS) if self.ran_ns < STARTED_NS else run_ns
        here_ns, ran_ns = (self.here_ns + elapsed_ns, self.ran_ns + counted_ns) if tsgs else (0, 0)
        spent_ns = self.start_spent_ns
        if spent_ns:
            spent_ns = max(0, spent_ns - round(START_REFILL * elapsed_ns))
        if ungated and self.ran_ns < STARTED_NS:
            spent_ns += min(run_ns, starts * BUDGETED_TURN_NS)
        whole_turns = run_ns / slice_ns if slice_ns else 0.0
        ended_early, fragmented = self._fragmented(max(0.0, starts - whole_turns), elapsed_ns)
        return Account(
            sample,
            self.used_ns + run_ns,
            tsgs,
            use,
            debt_ns,
            busy_tsgs,
            here_ns,
            ran_ns,
            spent_ns,
            ended_early,
            fragmented,
        )

    def settled(self, debt_ns: int) -> Account:
        """Begin a new round with the debt after the last."""
        return Account(
            self.last,
            self.used_ns,
            self.tsgs,
            NOTHING,
            debt_ns,
            self.busy_tsgs,
            self.here_ns,
            self.ran_ns,
            self.start_spent_ns,
            self.ended_early,
            self.fragmented,
        )

    def _fragmented(self, early: float, elapsed_ns: int) -> tuple[float, bool]:
        """Return its moving average of turns that it ended early per second, and whether it is fragmented."""
        if not elapsed_ns:
            return self.ended_early, self.fragmented
        part = min(1.0, elapsed_ns / FRAGMENTED_OVER_NS)
        rate = (1 - part) * self.ended_early + part * early * NS_PER_S / elapsed_ns
        return rate, rate > (UNFRAGMENTED if self.fragmented else FRAGMENTED)


#: Pods of one class that are busy together, each with its weight.
Mix = tuple[PodClass, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was measured on one pGPU so far, as far as decisions need it."""

    pgpu: int
    now_ns: int | None = None
    accounts: Mapping[str, Account] = field(default_factory=dict)
    #: The plan that samples are compared with, and when the current round began.
    plan: Plan | None = None
    round_began_ns: int = 0
    #: This plan changed the weights. Skip its first round: old slices still run.
    skip_round: bool = False
    #: The tuning of each mix of busy pods, the latest last.
    mixes: Mapping[Mix, Tuning] = field(default_factory=dict)
    #: What offline pods together came short of their floor, in ns; bounded, and 0 while none of them is busy.
    offline_short_ns: int = 0
    #: When NVML last reported a running kernel, or no figure.
    used_at_ns: int = 0
    #: The card's name as NVML reports it.
    card: str = ""
    #: NVML's utilization as of the last sample, 0 to 1; None: unknown.
    utilization: float | None = None
    #: GPU time that all pods together spent on starts outside their own windows and have not earned back yet, in ns.
    starts_spent_ns: int = 0

    def advance(self, sample: Sample) -> Ledger:
        """Fold in one sample, and forget pods that it does not contain."""
        elapsed_ns = 0 if self.now_ns is None else max(0, sample.now_ns - self.now_ns)
        known = self.accounts
        used_at_ns = self.used_at_ns if sample.utilization == 0 else sample.now_ns
        idle = sample.now_ns - used_at_ns >= max(CARD_IDLE_NS, 2 * self.plan.period_ns if self.plan else 0)
        ungated, slices_ns = self._ungated(), self._slices_ns()
        accounts = {
            pod.pod: (known.get(pod.pod) or Account(pod)).advance(
                pod, elapsed_ns, slices_ns.get(pod.pod, 0), idle=idle, ungated=pod.pod in ungated
            )
            for pod in sample.pods
        }
        starts_spent_ns = self._starts_spent_ns(accounts, ungated, elapsed_ns)
        began_ns = sample.now_ns if self.now_ns is None else self.round_began_ns
        over = self._round_over(sample.now_ns, began_ns)
        changed = _busy(known) != _busy(accounts)
        skip_round = self.skip_round
        mixes = self.mixes
        if known.keys() - accounts.keys():
            mixes = {mix: found for mix, found in mixes.items() if all(name in accounts for name, _ in mix[1])}
        if changed or over:
            entries = self._entries(accounts, over)
            round_ns = max(0, sample.now_ns - began_ns)
            ragged = changed or skip_round or self._is_ragged(round_ns)
            debts = settle(entries, round_ns, self.plan.period_ns if self.plan else round_ns, ragged=ragged)
            if not ragged:
                mixes = self._tuned(mixes, entries, round_ns, sample)
            elif changed:
                mixes = {mix: slice_tuner.interrupted(found) for mix, found in mixes.items()}
            accounts = {
                name: account.settled(debts[name]) if name in debts else account for name, account in accounts.items()
            }
            began_ns, skip_round = sample.now_ns, False
        short_ns = self._short_ns(sample, accounts, elapsed_ns)
        return Ledger(
            self.pgpu,
            sample.now_ns,
            accounts,
            self.plan,
            began_ns,
            skip_round,
            mixes,
            short_ns,
            used_at_ns,
            self.card,
            sample.utilization,
            starts_spent_ns,
        )

    @property
    def starting(self) -> bool:
        """Tell whether some pod is starting."""
        return True in [account.starting for account in self.accounts.values()]

    def planned(self, plan: Plan) -> Ledger:
        """Note the plan now in force. If its terms differ, start the round over and drop debts by weight.

        Debts against quotas stay, and so do those of a class whose own terms are the same. Terms include how pods take
        turns, because the way a pod used short slices tells nothing about long ones.
        """
        if plan == self.plan:
            return self
        if self.plan is not None and _terms(self.plan) == _terms(plan):
            return replace(self, plan=plan)
        kept = {part.pod for part in plan.pods if not part.weight or self._same(plan, part.pod_class)}
        accounts = {name: account if name in kept else account.settled(0) for name, account in self.accounts.items()}
        passing = self.plan is not None and not plan.gated and _weights(self.plan) != _weights(plan)
        return replace(self, plan=plan, accounts=accounts, round_began_ns=self.now_ns or 0, skip_round=passing)

    def _same(self, plan: Plan, pod_class: PodClass) -> bool:
        """Tell whether a plan aims at the same for the pods of a class as the one before."""
        return self.plan is not None and _terms(self.plan, pod_class) == _terms(plan, pod_class)

    def snapshot(self, period_ns: int, offline_floor: int = 0) -> Snapshot:
        """Return what a policy may know, with an operator's ``offline_floor`` in per cent."""
        known = self._tunings()
        satisfied = frozenset[str]().union(*(each.satisfied for each in known.values() if each is not None))
        fits_slice = frozenset[str]().union(*(each.fits_slice for each in known.values() if each is not None))
        owed = {
            name: round(ns)
            for pod_class, each in known.items()
            if each is not None and self._shared(pod_class) == each.sharing
            for name, ns in each.debts_ns.items()
        }
        all_spent = self.starts_spent_ns >= STARTS_TOGETHER * START_BUDGET_NS
        pods = tuple(
            Pod(
                name,
                account.last.grant,
                tuple([Tsg(tsg, idle_ns < IDLE_AFTER_NS) for tsg, idle_ns in account.tsgs.items()]),
                account.debt_ns or owed.get(name, 0),
                name in satisfied,
                name in fits_slice,
                account.fragmented,
                account.starting,
                all_spent or account.start_spent_ns >= START_BUDGET_NS,
            )
            for name, account in self.accounts.items()
        )
        offline, online = (
            found.sharing if (found := known[pod_class]) is not None else Sharing()
            for pod_class in (PodClass.OFFLINE, PodClass.ONLINE)
        )
        return Snapshot(
            self.pgpu,
            period_ns,
            pods,
            offline_floor=offline_floor,
            offline_short_ns=self.offline_short_ns,
            offline=offline,
            online=online,
            card=self.card,
        )

    def _shared(self, pod_class: PodClass) -> Sharing | None:
        """Return how pods of a class take turns under the plan in force; None where something else decides."""
        if self.plan is None:
            return None
        return self.plan.online if pod_class is PodClass.ONLINE else self.plan.offline

    def _tunings(self) -> dict[PodClass, Tuning | None]:
        """Return the tuning of the busy pods of each class; None if fewer than two are busy."""
        return {mix[0]: (self.mixes.get(mix) or self._begin(mix)) if len(mix[1]) > 1 else None for mix in self._mixes()}

    def _begin(self, mix: Mix) -> Tuning:
        """Return what is known of pods that were never seen together with these weights."""
        pod_class, weights = mix
        names = [name for name, _ in weights]
        for (other_class, other), known in reversed(list(self.mixes.items())):
            same = other_class is pod_class and [name for name, _ in other] == names
            if same and (found := known.with_other_weights()) is not None:
                return found
        return slice_tuner.begin([weight for _, weight in weights], pod_class, traits(self.card))

    def _mixes(self) -> tuple[Mix, ...]:
        """Return each class's pods that share by weights and are busy."""
        busy: dict[PodClass, list[tuple[str, int]]] = {pod_class: [] for pod_class in PodClass}
        accounts = self.accounts
        for part in self.plan.pods if self.plan else ():
            if part.weight and (account := accounts.get(part.pod)) is not None and account.busy_tsgs:
                busy[part.pod_class].append((part.pod, part.weight))
        return tuple([(pod_class, tuple(sorted(pods))) for pod_class, pods in busy.items()])

    def _slices_ns(self) -> dict[str, int]:
        """Return how long a whole turn of each pod lasts."""
        hardware = traits(self.card)
        return {part.pod: hardware.turn_ns(part.timeslice_us) for part in self.plan.pods} if self.plan else {}

    def _ungated(self) -> frozenset[str]:
        """Name the pods that are bound by a quota and may run outside of their own windows."""
        parts = self.plan.pods if self.plan else ()
        return frozenset([part.pod for part in parts if part.windows is None and not part.weight])

    def _starts_spent_ns(self, accounts: Mapping[str, Account], ungated: frozenset[str], elapsed_ns: int) -> int:
        refill_ns = round(START_REFILL * elapsed_ns)
        spent_ns = max(0, self.starts_spent_ns - STARTS_TOGETHER * refill_ns)
        for name in ungated & accounts.keys():
            before = self.accounts.get(name)
            left_ns = max(0, before.start_spent_ns - refill_ns) if before is not None else 0
            spent_ns += accounts[name].start_spent_ns - left_ns
        return spent_ns

    def _short_ns(self, sample: Sample, accounts: Mapping[str, Account], elapsed_ns: int) -> int:
        """Add what offline pods missed of the floor. Time beyond the floor repays that, but gives no credit."""
        floor = self.plan.offline_floor if self.plan else 0
        if not floor:
            return 0
        offline = [pod for pod in sample.pods if pod.grant.pod_class is PodClass.OFFLINE]
        if not any(accounts[pod.pod].busy for pod in offline):
            return 0
        used_ns = sum(pod.ended_ns + sum([tsg.run_ns for tsg in pod.tsgs]) for pod in offline)
        short_ns = self.offline_short_ns + elapsed_ns * floor // 100 - used_ns
        return max(0, min(FLOOR_TIMES * FLOOR_SPAN_NS * floor // 100, short_ns))

    def _round_over(self, now_ns: int, began_ns: int) -> bool:
        """Tell whether a new period of the plan has begun. Without gates every sample ends a round."""
        if self.plan is None or not self.plan.gated:
            return True
        return now_ns // self.plan.period_ns != began_ns // self.plan.period_ns

    def _is_ragged(self, round_ns: int) -> bool:
        """Tell whether a round of turns by gate differs from a whole number of periods."""
        if self.plan is None or not self.plan.gated:
            return False
        odd_ns = (round_ns + self.plan.period_ns // 2) % self.plan.period_ns - self.plan.period_ns // 2
        return abs(odd_ns) > _RAGGED * self.plan.period_ns

    def _entries(self, accounts: Mapping[str, Account], over: bool) -> dict[str, RoundEntry]:
        """List the pods to settle now. Quotas are settled only after a period, because a window may still follow."""
        parts = {part.pod: part for part in self.plan.pods} if self.plan else {}
        return {
            name: RoundEntry(
                account.last.grant,
                part,
                account.round,
                account.debt_ns,
                account.busy_tsgs,
                account.starting,
            )
            for name, account in accounts.items()
            if ((part := parts.get(name)) and part.weight) or over
        }

    def _tuned(
        self, mixes: Mapping[Mix, Tuning], entries: Mapping[str, RoundEntry], round_ns: int, sample: Sample
    ) -> Mapping[Mix, Tuning]:
        """Fold a round into the tuning of each class's mix of busy pods."""
        plan = self.plan
        if plan is None or not round_ns:
            return mixes
        for mix in self._mixes():
            applied = self._shared(mix[0])
            rivals = {name: entries[name] for name, _ in mix[1] if name in entries}
            if not 2 <= len(rivals) == len(mix[1]):
                continue
            foreign_ns = sum([entry.use.run_ns for name, entry in entries.items() if name not in rivals])
            if (known := mixes.get(mix)) is None:  # a new mix: no plan has used its first round yet
                found = self._begin(mix)
            else:
                found = slice_tuner.advance(
                    known, rivals, applied, round_ns, foreign_ns, plan.period_ns, sample.utilization, sample.now_ns
                )
            mixes = {**{other: mixes[other] for other in mixes if other != mix}, mix: found}
        return dict(list(mixes.items())[-_MIXES:])


def _busy(accounts: Mapping[str, Account]) -> frozenset[str]:
    return frozenset([name for name, account in accounts.items() if account.busy_tsgs])


def _weights(plan: Plan) -> list[tuple[str, int]]:
    return [(part.pod, part.weight) for part in plan.pods]


def _terms(plan: Plan, pod_class: PodClass | None = None) -> object:
    """Return what a plan aims at for the pods of a class, or all, without the corrections that change every tick."""
    parts = [
        (part.pod, part.pod_class, part.weight, part.windows is None)
        for part in plan.pods
        if pod_class in (None, part.pod_class)
    ]
    return (
        plan.period_ns,
        None if pod_class is PodClass.ONLINE else plan.offline,
        None if pod_class is PodClass.OFFLINE else plan.online,
        parts,
    )
