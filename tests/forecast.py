"""What a plan gives each pod, by arithmetic alone: the yardstick of the policy tests.

In every stretch of the period the TSGs that are busy and whose gate is open take turns, each as long as its timeslice
makes it. Time between turns is left out: this says what a plan asks for, the simulator says what comes of it.
"""

from __future__ import annotations

from qgpu.model import Plan, Snapshot
from qgpu.model.hardware_traits import traits
from qgpu.model.timeline import Timeline


def forecast(plan: Plan, snapshot: Snapshot, *, work: bool = False) -> dict[str, float]:
    """Return each pod's share of the pGPU (0 to 1) under ``plan`` when exactly the busy TSGs have work.

    With ``work`` the switches that are charged to a turn do not count.
    """
    timeline = Timeline(plan)
    idle = frozenset(pod.name for pod in snapshot.pods if not pod.busy)
    hardware = traits(snapshot.card)
    switched_ns = hardware.switched_ns if work else 0
    lasts = {part.pod: hardware.turn_ns(part.timeslice_us) - switched_ns for part in plan.pods}
    in_turn = {part.pod for part in plan.pods if part.tsg_turn_ns is not None}  # one TSG of the pod at a time
    running = {pod.name: sum(tsg.busy for tsg in pod.tsgs) for pod in snapshot.pods}
    turns = {name: lasts[name] * (min(1, busy) if name in in_turn else busy) for name, busy in running.items()}
    shares = dict.fromkeys(turns, 0.0)
    for start, end in zip(timeline.edges, (*timeline.edges[1:], plan.period_ns), strict=True):
        closed = timeline.closed(start, idle)
        runs = {name: turn for name, turn in turns.items() if turn and name not in closed}
        for name, turn in runs.items():
            shares[name] += (end - start) / plan.period_ns * turn / sum(runs.values())
    return shares
