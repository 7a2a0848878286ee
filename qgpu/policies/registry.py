"""The policies of qgpu by name. A new policy is one file and one line here.

A policy is a pure function from Snapshot to Plan. The configuration and the module may use its number instead of its
name.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgpu.errors import UnknownNameError
from qgpu.model import Plan, Policy, Snapshot
from qgpu.policies import best_effort, burst_share, fixed_share
from qgpu.policies.copy_engines import share_copy_engines
from qgpu.policies.gangs import gangs_first
from qgpu.policies.online_first import online_first


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """A policy with its number, what admission has to check for it, and its promises, which the tests verify."""

    number: int
    plan: Policy
    #: Every offline pod must have a quota, because the policy gives nothing to a pod without one.
    needs_quota: bool = False
    #: Every busy pod that has a quota gets at least that: quotas are floors.
    guarantees: bool = False
    #: No pod gets more than its quota, even while the pGPU idles: quotas are upper bounds, kept by windows.
    caps: bool = False


POLICIES: dict[str, PolicyInfo] = {
    "best-effort": PolicyInfo(0, best_effort.plan),
    "fixed-share": PolicyInfo(1, fixed_share.plan, needs_quota=True, guarantees=True, caps=True),
    "burst-share": PolicyInfo(2, burst_share.plan, guarantees=True),
}


def find(name: str) -> str:
    """Return the canonical name of a policy given by name or number. Raises UnknownNameError."""
    for known, info in POLICIES.items():
        if name in (known, str(info.number)):
            return known
    raise UnknownNameError(f"policy {name!r}: there is no such policy; choose one of {', '.join(POLICIES)}")


def compose(offline: str, online: str) -> Policy:
    """Build the loop's policy: online pods first, then gangs, then all others; copies share in the same ratio."""
    behind, front = gangs_first(POLICIES[offline].plan), POLICIES[online]
    return _remembered(share_copy_engines(online_first(behind, front.plan, guarantees=front.guarantees)))


def _remembered(policy: Policy) -> Policy:
    """Return a pGPU's last plan while its snapshot stays the same, as it mostly does from tick to tick."""
    last: dict[int, tuple[Snapshot, Plan]] = {}

    def plan(snapshot: Snapshot) -> Plan:
        known = last.get(snapshot.pgpu)
        if known is None or known[0] != snapshot:
            known = last[snapshot.pgpu] = snapshot, policy(snapshot)
        return known[1]

    return plan
