"""The scheduling loop: fold the sample into the ledger, ask the policy, apply the plan, wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qgpu.model import NS_PER_MS, Policy
from qgpu.model.plane_api import Backend
from qgpu.sched.ledger import Ledger

#: A plan holds for a lease of at most a second, depending on the plane. So it is renewed this often, however long the
#: period is.
RENEW_NS = 250 * NS_PER_MS

#: While a pod starts, ticks come this often, because the others' slices are short until a tick shows that it started.
STARTING_TICK_NS = 25 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may change while the loop runs."""

    policy: Policy
    period_ns: int
    #: Per cent of the GPU that offline pods get, however much online work there is.
    offline_floor: int = 0


def tick(backend: Backend, settings: Settings, ledger: Ledger) -> Ledger:
    """Run the loop's body once and return the ledger after it. Raises what the backend raises."""
    ledger = ledger.advance(sample := backend.sample())
    plan = settings.policy(ledger.snapshot(settings.period_ns, settings.offline_floor))
    backend.apply(plan)
    backend.wait(until_due(sample.now_ns, plan.period_ns, STARTING_TICK_NS if ledger.starting else RENEW_NS))
    return ledger.planned(plan)


def run(
    backend: Backend,
    settings: Callable[[], Settings],
    ledger: Ledger,
    stopped: Callable[[], bool],
    seen: Callable[[Ledger], None] = lambda _: None,
) -> None:
    """Tick until ``stopped()``. Call ``settings`` before every tick, and ``seen`` with the ledger after it."""
    while not stopped():
        ledger = tick(backend, settings(), ledger)
        seen(ledger)


def until_due(now_ns: int, period_ns: int, at_most_ns: int = RENEW_NS) -> int:
    """Return the ns from ``now_ns`` to the next tick: ``at_most_ns``, shortened to a whole number of ticks a period.

    Ticks lie at fixed phases of the plan's period, however long a tick takes. If samples drifted through the period,
    one would show all of one pod's turn and the next all of another's, and the ledger would book that as debt.
    """
    ticks = -(-period_ns // at_most_ns)  # the fewest per period that are frequent enough
    phase_ns = now_ns % period_ns
    following = phase_ns * ticks // period_ns + 1
    return -(-following * period_ns // ticks) - phase_ns  # rounded up: never before the tick
