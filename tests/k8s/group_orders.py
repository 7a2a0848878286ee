"""Restart orders in which pods share claims through MPS: keepers and their supervisor fail and come back as well."""

from __future__ import annotations

from tests.k8s.claim_orders import ClaimOrders, Live
from tests.k8s.group_node import GroupWorld
from tests.k8s.orders import Choice
from tests.k8s.world import GI


class GroupOrders(ClaimOrders):
    """One order with claims that have groups."""

    world: GroupWorld

    def hold(self, choice: Choice) -> None:
        """The scheduler allocates what is left to a claim that several pods share."""
        if not self.world.api.running:
            return
        gpu, cores = choice.gpu % self.world.cards, choice.cores
        memory = 1 + choice.memory % (self.world.memory // GI // 4)
        held = [each.cards.get(gpu, (0, 0)) for each in (*self.live.values(), *self.leaving.values())]
        if sum(of for of, _ in held) + memory * GI > self.world.memory or sum(of for _, of in held) + cores > 100:
            return
        made = self.world.group_claim(gpu=gpu, memory=f"{memory}Gi", cores=str(cores))
        self.live[made["metadata"]["uid"]] = Live(made, {gpu: (memory * GI, cores)})
        self.tally.claims += 1

    def start_container(self, choice: Choice) -> None:
        """A container of a prepared claim starts; without the supervisor it may be refused."""
        if self.world.runs("groups"):
            super().start_container(choice)

    def kubelet_works(self, choice: Choice | None = None) -> None:
        """Prepare claims and give them up; without the supervisor that may wait, too."""
        if self.world.runs("groups"):
            super().kubelet_works(choice)

    def group(self, each: Live) -> str:
        """The name of a claim's group."""
        return f"claim-{each.uid}"

    def settled(self) -> bool:
        """Tell whether exactly the live claims have groups, too."""
        groups = {f"claim-{uid}" for uid in self.live}
        return super().settled() and self.world.groups() == self.world.keepers().keys() == groups

    def judge(self) -> None:
        """Say what did not settle."""
        if left := self.world.groups() - {f"claim-{uid}" for uid in self.live}:
            self.broken("leaks", f"{left}")
        super().judge()
