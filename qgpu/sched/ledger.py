"""What the loop remembers: samples folded into GPU time used, debt, and who was busy of late.

A pure fold: ``advance`` and ``planned`` return a new ledger. It decides nothing; policies read it through a
snapshot. What the pods of a pGPU owe each other after a round is reckoned in ``qgpu.sched.settle``.
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
    Plan,
    Pod,
    PodClass,
    PodSample,
    Sample,
    Snapshot,
    Tsg,
)
from qgpu.sched.settle import settle
from qgpu.sched.standing import NOTHING, Entry, Standing, Use

#: A TSG counts as busy until it had its gate open for this long without running.
IDLE_AFTER_NS = 500 * NS_PER_MS

#: A pod that rested for this long is taken for a new one: timeslices may bind it now.
FORGET_AFTER_NS = 2_000 * NS_PER_MS

#: A pod that has run for less than this since it has TSGs is still starting its processes. Others are asked to
#: make room for that, but for no longer than this.
STARTED_NS = 5 * NS_PER_MS
STARTING_NS = 3_000 * NS_PER_MS

#: Timeslices have become longer if all are by so much; so soon after the last time that tells nothing new. Else whoever
#: starts and ends a process ten times a second would keep all others from ever being judged.
_LONGER = 1.25
_LONGER_AGAIN_NS = 1_000 * NS_PER_MS

#: A round that is off a whole number of periods by more than this part of one tells more of its ends than of shares.
_RAGGED = 0.02


class Account(NamedTuple):
    """One pod: GPU time used since it came, what it did in this round, and where it stands after the last."""

    last: PodSample
    used_ns: int = 0
    #: Of each TSG the time with an open gate, in ns, since it last ran; bounded.
    tsgs: Mapping[str, int] = MappingProxyType({})
    round: Use = NOTHING
    standing: Standing = Standing()
    #: How many of its TSGs had work of late.
    busy_tsgs: int = 0
    #: Since it has TSGs: for how long that is, and what they ran.
    here_ns: int = 0
    ran_ns: int = 0

    @property
    def busy(self) -> bool:
        """Tell whether any of its TSGs had work of late."""
        return self.busy_tsgs > 0

    @property
    def starting(self) -> bool:
        """Tell whether its processes have come only just and hardly run."""
        return bool(self.tsgs) and self.ran_ns < STARTED_NS and self.here_ns < STARTING_NS

    @property
    def debt_ns(self) -> int:
        """Return the time it had beyond (positive) or short of (negative) what it was meant to have."""
        return self.standing.debt_ns

    def advance(self, sample: PodSample, elapsed_ns: int) -> Account:
        """Fold one sample of ``elapsed_ns`` in."""
        open_ns = max(0, elapsed_ns - sample.gated_ns)
        run_ns, starts, tsgs, busy_tsgs, rested = 0, 0, {}, 0, True
        for tsg in sample.tsgs:
            idle_ns = 0
            if tsg.run_ns or tsg.starts:
                run_ns += tsg.run_ns
                starts += tsg.starts
            else:
                idle_ns = min(FORGET_AFTER_NS, self.tsgs.get(tsg.tsg, FORGET_AFTER_NS) + open_ns)
            tsgs[tsg.tsg] = idle_ns
            busy_tsgs += idle_ns < IDLE_AFTER_NS
            rested = rested and idle_ns >= FORGET_AFTER_NS
        standing = self.standing
        if sample.grant is not self.last.grant and sample.grant != self.last.grant:
            standing = standing.anew
        if rested:
            # What it owes it goes on paying for: else whoever ends and starts again would owe nothing.
            standing = Standing(max(0, standing.debt_ns))
        round_ran_ns, round_starts, round_open_ns, passed_ns = self.round
        use = Use(round_ran_ns + run_ns, round_starts + starts, round_open_ns + open_ns, passed_ns + elapsed_ns)
        here_ns, ran_ns = (self.here_ns + elapsed_ns, self.ran_ns + run_ns) if tsgs else (0, 0)
        return Account(sample, self.used_ns + run_ns, tsgs, use, standing, busy_tsgs, here_ns, ran_ns)

    def settled(self, standing: Standing) -> Account:
        """Begin a new round, with what has come of the last."""
        return Account(self.last, self.used_ns, self.tsgs, NOTHING, standing, self.busy_tsgs, self.here_ns, self.ran_ns)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything measured on one pGPU so far, as far as decisions need it."""

    pgpu: int
    now_ns: int | None = None
    accounts: Mapping[str, Account] = field(default_factory=dict)
    #: The plan that samples are held against, and since when its present round is reckoned.
    plan: Plan | None = None
    round_began_ns: int = 0
    #: Weights or timeslices have changed with this plan: in its first round turns of the plan before run out, which
    #: tells nothing.
    passing_over: bool = False
    #: When timeslices became longer, the last time that counted.
    lengthened_ns: int | None = None
    #: What offline pods came short of their floor together; bounded, and nothing while none of them wants anything.
    offline_short_ns: int = 0

    def advance(self, sample: Sample) -> Ledger:
        """Fold one sample in; pods that are gone from it are forgotten."""
        elapsed_ns = 0 if self.now_ns is None else max(0, sample.now_ns - self.now_ns)
        known = self.accounts
        accounts = {pod.pod: (known.get(pod.pod) or Account(pod)).advance(pod, elapsed_ns) for pod in sample.pods}
        began_ns = sample.now_ns if self.now_ns is None else self.round_began_ns
        over = self._round_over(sample.now_ns, began_ns)
        changed = _busy(known) != _busy(accounts)
        passing_over = self.passing_over
        if changed or over:
            accounts = self._in_new_round(accounts, sample.now_ns - began_ns, over, ragged=changed or passing_over)
            began_ns, passing_over = sample.now_ns, False
        short_ns = self._short_ns(sample, accounts, elapsed_ns)
        return Ledger(
            self.pgpu, sample.now_ns, accounts, self.plan, began_ns, passing_over, self.lengthened_ns, short_ns
        )

    @property
    def starting(self) -> bool:
        """Tell whether some pod is starting."""
        return True in [account.starting for account in self.accounts.values()]

    def planned(self, plan: Plan) -> Ledger:
        """Note what the pods are meant to get from now on. Where that differs, all but quotas starts anew.

        So it does where all timeslices are much longer than before, as once nobody starts any more: how short turns
        were used says nothing of long ones.
        """
        if plan == self.plan:
            return self
        same = self.plan is not None and _terms(self.plan) == _terms(plan)
        if same and not self._lengthened(plan):
            return replace(self, plan=plan)
        kept = {part.pod for part in plan.pods if not part.weight}
        accounts = {
            name: account if name in kept else account.settled(account.standing.anew)
            for name, account in self.accounts.items()
        }
        passing = same or (self.plan is not None and not plan.gated and _weights(self.plan) != _weights(plan))
        now_ns = self.now_ns or 0
        lengthened_ns = now_ns if same else self.lengthened_ns
        return replace(
            self,
            plan=plan,
            accounts=accounts,
            round_began_ns=now_ns,
            passing_over=passing,
            lengthened_ns=lengthened_ns,
        )

    def _lengthened(self, plan: Plan) -> bool:
        """Tell whether everybody's timeslices are longer: one pod's are with each process of it that ends."""
        if self.plan is None or plan.gated:
            return False
        if self.lengthened_ns is not None and (self.now_ns or 0) - self.lengthened_ns < _LONGER_AGAIN_NS:
            return False
        parts = zip(self.plan.pods, plan.pods, strict=True)
        return all(part.timeslice_us >= _LONGER * was.timeslice_us for was, part in parts)

    def snapshot(self, period_ns: int, offline_floor: int = 0) -> Snapshot:
        """Show a policy what it may know, and what an operator set."""
        pods = tuple(
            Pod(
                name,
                account.last.grant,
                tuple([Tsg(tsg, idle_ns < IDLE_AFTER_NS) for tsg, idle_ns in account.tsgs.items()]),
                account.used_ns,
                account.debt_ns,
                account.standing.pace,
                account.starting,
            )
            for name, account in self.accounts.items()
        )
        return Snapshot(self.pgpu, period_ns, pods, offline_floor=offline_floor, offline_short_ns=self.offline_short_ns)

    def _short_ns(self, sample: Sample, accounts: Mapping[str, Account], elapsed_ns: int) -> int:
        """Add what offline pods missed of the floor in a sample; time beyond the floor pays it, and is not saved up."""
        floor = self.plan.offline_floor if self.plan else 0
        if not floor:
            return 0
        offline = [pod for pod in sample.pods if pod.grant.pod_class is PodClass.OFFLINE]
        if not any(accounts[pod.pod].busy for pod in offline):
            return 0
        used_ns = sum(tsg.run_ns for pod in offline for tsg in pod.tsgs)
        short_ns = self.offline_short_ns + elapsed_ns * floor // 100 - used_ns
        return max(0, min(FLOOR_TIMES * FLOOR_SPAN_NS * floor // 100, short_ns))

    def _round_over(self, now_ns: int, began_ns: int) -> bool:
        """Tell whether a new period of the plan has begun; timeslices know no periods, every sample is a round."""
        if self.plan is None or not self.plan.gated:
            return True
        return now_ns // self.plan.period_ns != began_ns // self.plan.period_ns

    def _in_new_round(
        self, accounts: Mapping[str, Account], round_ns: int, over: bool, *, ragged: bool
    ) -> dict[str, Account]:
        """Settle the round and begin another.

        Of a ragged one only quotas are settled, and those at the end of the period: a window may still be to come.
        """
        round_ns = max(0, round_ns)
        if self.plan is not None and self.plan.gated:
            odd_ns = (round_ns + self.plan.period_ns // 2) % self.plan.period_ns - self.plan.period_ns // 2
            ragged = ragged or abs(odd_ns) > _RAGGED * self.plan.period_ns
        parts = {part.pod: part for part in self.plan.pods} if self.plan else {}
        entries = {
            name: Entry(
                account.last.grant,
                part,
                account.round,
                account.standing,
                account.busy_tsgs,
                account.ran_ns < STARTED_NS,
            )
            for name, account in accounts.items()
            if ((part := parts.get(name)) and part.weight) or over
        }
        standings = settle(entries, round_ns, self.plan.period_ns if self.plan else round_ns, ragged=ragged)
        return {
            name: account.settled(standings[name]) if name in standings else account
            for name, account in accounts.items()
        }


def _busy(accounts: Mapping[str, Account]) -> frozenset[str]:
    return frozenset([name for name, account in accounts.items() if account.busy_tsgs])


def _weights(plan: Plan) -> list[tuple[str, int]]:
    return [(part.pod, part.weight) for part in plan.pods]


def _terms(plan: Plan) -> object:
    """Return what a plan aims at, without the corrections that change from tick to tick."""
    return plan.period_ns, [(part.pod, part.pod_class, part.weight, part.windows is None) for part in plan.pods]
