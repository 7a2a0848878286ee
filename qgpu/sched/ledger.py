"""What the loop remembers: samples folded into GPU time used, debt, and who was busy of late.

A pure fold: ``advance`` returns a new ledger. It decides nothing; policies read it through a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qgpu.model import NS_PER_MS, Pod, PodSample, Sample, Snapshot, Tsg, TsgSample

#: A TSG counts as busy until it had its gate open for this long without running.
IDLE_AFTER_NS = 500 * NS_PER_MS

#: Debt is bounded by what a pod is entitled to in this time: nothing older is paid back or hoarded.
DEBT_HORIZON_NS = 1000 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class TsgAccount:
    """One TSG: when (by open-gate time) it last ran."""

    idle_ns: int = IDLE_AFTER_NS

    def advance(self, sample: TsgSample, open_ns: int) -> TsgAccount:
        """Fold one sample in; ``open_ns`` is how long the gate was open in it."""
        ran = sample.run_ns > 0 or sample.starts > 0
        return TsgAccount(0 if ran else min(IDLE_AFTER_NS, self.idle_ns + open_ns))

    @property
    def busy(self) -> bool:
        """Tell whether it had work of late."""
        return self.idle_ns < IDLE_AFTER_NS


@dataclass(frozen=True, slots=True)
class Account:
    """One pod: GPU time used since it came, and time owed (positive) or due (negative) against its quota."""

    last: PodSample
    used_ns: int = 0
    debt_ns: int = 0
    tsgs: Mapping[str, TsgAccount] = field(default_factory=dict)

    def advance(self, sample: PodSample, elapsed_ns: int) -> Account:
        """Fold one sample of ``elapsed_ns`` in."""
        open_ns = max(0, elapsed_ns - sample.gated_ns)
        tsgs = {tsg.tsg: self.tsgs.get(tsg.tsg, TsgAccount()).advance(tsg, open_ns) for tsg in sample.tsgs}
        run_ns = sum(tsg.run_ns for tsg in sample.tsgs)
        return Account(sample, self.used_ns + run_ns, self._debt(sample, run_ns, elapsed_ns, tsgs), tsgs)

    def _debt(self, sample: PodSample, run_ns: int, elapsed_ns: int, tsgs: Mapping[str, TsgAccount]) -> int:
        if sample.grant.cores is None or not any(tsg.busy for tsg in tsgs.values()):
            return 0
        bound = DEBT_HORIZON_NS * sample.grant.cores // 100
        debt = self.debt_ns + run_ns - elapsed_ns * sample.grant.cores // 100
        return max(-bound, min(bound, debt))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything measured on one pGPU so far, as far as decisions need it."""

    pgpu: int
    now_ns: int | None = None
    accounts: Mapping[str, Account] = field(default_factory=dict)

    def advance(self, sample: Sample) -> Ledger:
        """Fold one sample in; pods that are gone from it are forgotten."""
        elapsed_ns = 0 if self.now_ns is None else max(0, sample.now_ns - self.now_ns)
        accounts = {pod.pod: self.accounts.get(pod.pod, Account(pod)).advance(pod, elapsed_ns) for pod in sample.pods}
        return Ledger(self.pgpu, sample.now_ns, accounts)

    def snapshot(self, period_ns: int) -> Snapshot:
        """Show a policy what it may know."""
        pods = tuple(
            Pod(
                name,
                account.last.grant,
                tuple(Tsg(tsg, state.busy) for tsg, state in account.tsgs.items()),
                account.used_ns,
                account.debt_ns,
            )
            for name, account in self.accounts.items()
        )
        return Snapshot(self.pgpu, period_ns, pods)
