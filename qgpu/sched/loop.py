"""The heart: advance the ledger with what happened, ask the policy, apply the plan, wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qgpu.model import NS_PER_MS, Policy
from qgpu.sched.backend import Backend
from qgpu.sched.ledger import Ledger

#: A plan is a lease (about a second on every plane), so it is renewed this often however long the period is.
RENEW_NS = 250 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may change while the loop runs."""

    policy: Policy
    period_ns: int


def tick(backend: Backend, settings: Settings, ledger: Ledger) -> Ledger:
    """Do one round and return the ledger after it."""
    ledger = ledger.advance(backend.sample())
    backend.apply(settings.policy(ledger.snapshot(settings.period_ns)))
    backend.wait(min(settings.period_ns, RENEW_NS))
    return ledger


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
