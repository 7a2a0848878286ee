"""How the pods of a pGPU stand: what they got in the last seconds, what turns cost them, and who is below its quota."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qgpu.config import GpuSettings
from qgpu.metrics.quota_check import below_quota
from qgpu.metrics.tally import PodTally, Recent, Tally
from qgpu.model import PodClass
from qgpu.model.hardware_traits import traits
from qgpu.policies.registry import POLICIES
from qgpu.sched.ledger import Ledger


@dataclass(frozen=True, slots=True)
class PodUsage:
    """One pod on one pGPU."""

    counted: PodTally = field(default_factory=PodTally)
    recent: Recent = field(default_factory=Recent)
    #: How long its switches in and out took so far, in ns: their number times what one takes on this model of card.
    switch_ns: int = 0
    #: Why it gets less than its quota; empty if it does not.
    below_quota: str = ""


#: A pod that the loop has not seen yet.
UNSEEN = PodUsage()


def pod_usages(ledger: Ledger, tally: Tally, settings: GpuSettings) -> Mapping[str, PodUsage]:
    """Return the standing of every pod that the loop knows."""
    recent, switched_ns = tally.recent(), traits(ledger.card).switched_ns
    counts = tally.pods
    return {
        name: PodUsage(
            count := counts.get(name, UNSEEN.counted),
            recent.get(name, UNSEEN.recent),
            count.starts * switched_ns,
            below_quota(name, ledger, recent, _guarantees_nothing(account.last.grant.pod_class, settings)),
        )
        for name, account in ledger.accounts.items()
    }


def _guarantees_nothing(pod_class: PodClass, settings: GpuSettings) -> str:
    """Return the policy in force for a class if it guarantees no quotas; else an empty text."""
    policy = settings.online_policy if pod_class is PodClass.ONLINE else settings.policy
    return "" if POLICIES[policy].guarantees else policy
