"""What sharing should add to an online pod's p99 now: from the slices in force and the card's measured table.

It is not measured. No ioctl announces a kernel launch, so nobody outside a program sees how long its work waited.
"""

from __future__ import annotations

from qgpu.model import PodClass
from qgpu.model.hardware_traits import traits
from qgpu.policies.latency_targets import added_ns
from qgpu.sched.ledger import Ledger


def expected_wait_p99_ns(ledger: Ledger, pod: str) -> int | None:
    """Return the time in ns for work of ``pod`` that arrives at any moment, 0 if no other pod is busy.

    None for offline pods, without a plan, and on a card whose latencies were not measured.
    """
    hardware = traits(ledger.card)
    plan, account = ledger.plan, ledger.accounts.get(pod)
    online = account is not None and account.last.grant.pod_class is PodClass.ONLINE
    if plan is None or not online or not hardware.p99_measured:
        return None
    offline_ns, online_ns = 0, 0
    for part in plan.pods:
        other = ledger.accounts.get(part.pod)
        if part.pod == pod or other is None or not other.busy:
            continue
        waits_ns = added_ns(part.timeslice_us, hardware)
        if part.pod_class is PodClass.ONLINE:  # each of their TSGs has a turn before the pod's next
            online_ns += waits_ns * other.busy_tsgs
        else:  # online work takes the engine when the running slice ends
            offline_ns = max(offline_ns, waits_ns)
    return offline_ns + online_ns
