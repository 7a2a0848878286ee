"""Whether a pod is below its quota, and why: a pure rule on what the last seconds showed.

Only a pod that was busy all the time can be below its quota. No ioctl announces a launch, so nobody knows when a pod
wants the GPU. But a pod that is neither on the GPU nor kept from it has no work: its gate is open, and at most one
turn of every other busy TSG passes between two of its own turns. That bounds what it waited, and so what it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from qgpu.metrics.tally import Recent
from qgpu.model import PodClass
from qgpu.model.hardware_traits import traits
from qgpu.sched.ledger import Ledger

#: A pod is below its quota if it gets less than this part of it.
BELOW = 0.95
#: A quarter more than one turn of every other pod, because samples come late.
_LATE = 1.25


def below_quota(pod: str, ledger: Ledger, recent: Mapping[str, Recent], not_guaranteed_by: str) -> str:
    """Return why a pod gets less than its quota; empty if it does not, or has no quota.

    ``not_guaranteed_by`` is the policy in force for the pod if that guarantees no quotas, else empty. The reason begins
    with "policy", "asks for less" or "waits".
    """
    account, mine = ledger.accounts.get(pod), recent.get(pod)
    if account is None or mine is None or not mine.busy_throughout or account.last.grant.cores is None:
        return ""
    quota = account.last.grant.cores / 100
    if mine.share >= BELOW * quota:
        return ""
    turns = min(1.0 - mine.share - mine.gated, _LATE * mine.starts_per_s * _others_turn_s(pod, ledger))
    rest = 1.0 - mine.share - mine.gated - max(0.0, turns)
    alone = mine.share / max(1e-9, mine.share + max(0.0, rest))
    if alone < BELOW * quota:
        return f"asks for less: alone it would use {alone:.0%} at most"
    if not_guaranteed_by:
        among = " among online pods" if account.last.grant.pod_class is PodClass.ONLINE else ""
        return f"policy {not_guaranteed_by}{among} guarantees no quota"
    online = sum(recent[name].share for name in _online(ledger) if name in recent)
    if account.last.grant.pod_class is PodClass.OFFLINE and online >= quota - mine.share:
        return f"waits: online pods run first, and were on the engine {online:.0%} of the time"
    return f"waits: {mine.gated:.0%} of the time at its gate, up to {max(0.0, turns):.0%} for other pods' turns"


def _others_turn_s(pod: str, ledger: Ledger) -> float:
    """Return how long one turn of every busy TSG of the other pods lasts, in seconds; without a plan, no bound."""
    if ledger.plan is None:
        return float("inf")
    hardware = traits(ledger.card)
    turns_ns = (
        account.busy_tsgs * (hardware.turn_ns(part.timeslice_us) + hardware.gap_ns)
        for part in ledger.plan.pods
        if part.pod != pod and (account := ledger.accounts.get(part.pod)) is not None
    )
    return sum(turns_ns) / 1e9


def _online(ledger: Ledger) -> list[str]:
    return [name for name, each in ledger.accounts.items() if each.last.grant.pod_class is PodClass.ONLINE]
