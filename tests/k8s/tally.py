"""What happened in restart orders: counted while they run, and written to the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

#: How much is kept of what is said of a failed order.
_SAID = 2000


@dataclass
class Tally:
    """What happened in all orders so far."""

    orders: int = 0
    kills: int = 0
    claims: int = 0
    containers: int = 0
    grants_lost: int = 0
    sold_twice: int = 0
    leaks: int = 0
    #: Orders in which a promise was broken, or anything else went wrong.
    failed_orders: int = 0
    #: How often each part failed, and how often while a pod came, started or ended.
    parts: dict[str, int] = field(default_factory=dict)
    parts_beside: dict[str, int] = field(default_factory=dict)
    #: How often two parts failed together.
    pairs: dict[str, int] = field(default_factory=dict)
    #: What was said of the orders that failed.
    said: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        """How often a promise was broken."""
        return self.grants_lost + self.sold_twice + self.leaks

    def fail(self, perils: Sequence[str], beside: bool) -> None:
        """Count what fails at once."""
        self.kills += len(perils)
        for peril in perils:
            self.parts[peril] = self.parts.get(peril, 0) + 1
            if beside:
                self.parts_beside[peril] = self.parts_beside.get(peril, 0) + 1
        for pair in pairs_of(perils):
            self.pairs[pair] = self.pairs.get(pair, 0) + 1

    def fail_order(self, why: str) -> None:
        """Count an order that failed."""
        self.failed_orders += 1
        self.said.append(why[:_SAID])

    def expect(self, perils: Iterable[str]) -> None:
        """Count what can fail, and what never does, too."""
        perils = sorted(set(perils))
        for counts, names in ((self.parts, perils), (self.parts_beside, perils), (self.pairs, pairs_of(perils))):
            counts.update({name: counts.get(name, 0) for name in names})

    @property
    def never(self) -> list[str]:
        """The pairs that were expected and never failed together."""
        return [pair for pair, count in self.pairs.items() if not count]


def pairs_of(perils: Iterable[str]) -> list[str]:
    """Return all pairs, by the name that the tally gives them."""
    return [f"{one} and {other}" for one, other in combinations(sorted(set(perils)), 2)]
