"""The heart: advance the ledger with what happened, ask the policy, apply the plan, wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qgpu.model import NS_PER_MS, Policy
from qgpu.model.plane_api import Backend
from qgpu.sched.ledger import Ledger

#: A plan is a lease (of a second at most, by plane), so it is renewed this often however long the period is.
RENEW_NS = 250 * NS_PER_MS

#: While a pod starts, the others' slices are short; ticks come this often then, so that it ends soon.
STARTING_NS = 25 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may change while the loop runs."""

    policy: Policy
    period_ns: int
    #: Per cent of the GPU for offline pods, however much online work there is.
    offline_floor: int = 0


def tick(backend: Backend, settings: Settings, ledger: Ledger) -> Ledger:
    """Do one round and return the ledger after it."""
    ledger = ledger.advance(sample := backend.sample())
    plan = settings.policy(ledger.snapshot(settings.period_ns, settings.offline_floor))
    backend.apply(plan)
    backend.wait(until_due(sample.now_ns, plan.period_ns, STARTING_NS if ledger.starting else RENEW_NS))
    return ledger.planned(plan)


def run(
    backend: Backend,
    settings: Callable[[], Settings],
    ledger: Ledger,
    stopped: Callable[[], bool],
    seen: Callable[[Ledger], None] = lambda _: None,
) -> None:
    """Tick until ``stopped``; ``settings`` is asked before every tick and ``seen`` shown the ledger after it."""
    while not stopped():
        ledger = tick(backend, settings(), ledger)
        seen(ledger)


def until_due(now_ns: int, period_ns: int, at_most_ns: int = RENEW_NS) -> int:
    """Return the ns from ``now_ns`` to the next tick, of which a whole number lie in a period.

    Ticks lie at fixed phases of the plan's period, whatever a tick itself takes: a sample that drifted through
    the period would show now one pod's turn and now another's in full, and the ledger would take it for debt.
    """
    ticks = -(-period_ns // at_most_ns)  # as few in a period as are often enough
    phase_ns = now_ns % period_ns
    following = phase_ns * ticks // period_ns + 1
    return -(-following * period_ns // ticks) - phase_ns  # rounded up: at that tick, never before it
