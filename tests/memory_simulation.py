"""A card's memory in virtual time under memory turns: pods come and go, moves take their time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from qgpu.model import NS_PER_S, PodClass
from qgpu.policies import memory_turns
from qgpu.policies.memory_turns import GIB, Moves, Pace, Place, PodMemory


@dataclass
class Resident:
    """A pod on the stage: what the policy sees of it, and what became of it."""

    seen: PodMemory
    #: What it uses once it has begun, in bytes.
    uses: int
    begun: bool = False
    #: When its move ends.
    arrives_ns: int = 0
    on_ns: int = 0
    moves: list[tuple[int, str]] = field(default_factory=list)


class MemorySimulation:
    """One card. ``step`` lets time pass and the policy decide."""

    def __init__(self, capacity: int, pace: Pace | None = None, step_ns: int = NS_PER_S) -> None:
        self.capacity, self.pace, self.step_ns = capacity, pace or Pace(), step_ns
        self.now_ns = 0
        self.pods: dict[str, Resident] = {}
        self._charged: dict[str, int] = {}

    def add(
        self,
        name: str,
        limit: int,
        uses: int | None = None,
        cores: int | None = None,
        pod_class: PodClass = PodClass.OFFLINE,
    ) -> None:
        """Admit a pod; it begins as soon as there is room."""
        place = Place.ON if pod_class is PodClass.ONLINE else Place.OFF
        self.pods[name] = Resident(
            PodMemory(name, pod_class, place, limit, cores=cores), limit if uses is None else uses
        )

    def remove(self, name: str) -> None:
        """End a pod."""
        del self.pods[name]

    def change(self, name: str, **changes: object) -> None:
        """Change what the policy sees of a pod."""
        self.pods[name].seen = replace(self.pods[name].seen, **changes)  # type: ignore[arg-type]

    def place(self, name: str) -> Place:
        """Return where a pod is."""
        return self.pods[name].seen.place

    @property
    def charged(self) -> dict[str, int]:
        """Return the charges."""
        return dict(self._charged)

    def seen(self) -> list[PodMemory]:
        """Return what the policy sees now."""
        return [replace(pod.seen, charged_ns=self._charged.get(name, 0)) for name, pod in self.pods.items()]

    def step(self) -> Moves:
        """Decide, begin what was decided, and let a step pass. Return the decision."""
        moves = memory_turns.decide(self.capacity, self.seen(), self.pace)
        for name in moves.leave:
            self._begin(name, Place.LEAVING, self.pace.off_ns_per_gib)
        for name in moves.come:
            self._begin(name, Place.COMING, self.pace.back_ns_per_gib)
        for pod in self.pods.values():
            if pod.seen.pod_class is PodClass.ONLINE and not pod.begun and not moves.short:
                pod.begun, pod.seen = True, replace(pod.seen, used=pod.uses)
        before = [pod.seen for pod in self.pods.values()]
        self._charged = memory_turns.charge(self._charged, before, self.step_ns, self.pace)
        self.now_ns += self.step_ns
        for pod in self.pods.values():
            pod.seen = replace(pod.seen, stay_ns=pod.seen.stay_ns + self.step_ns)
            if pod.seen.place is Place.ON and pod.begun:
                pod.on_ns += self.step_ns
            self._arrive(pod)
        return moves

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_ns = self.now_ns + round(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self.step()

    def _begin(self, name: str, place: Place, ns_per_gib: int) -> None:
        pod = self.pods[name]
        pod.moves.append((self.now_ns, place.value))
        pod.arrives_ns = self.now_ns + max(pod.seen.used, pod.seen.away) * ns_per_gib // GIB
        pod.seen = replace(pod.seen, place=place, stay_ns=0)
        self._arrive(pod)

    def _arrive(self, pod: Resident) -> None:
        if pod.seen.place not in (Place.LEAVING, Place.COMING) or pod.arrives_ns > self.now_ns:
            return
        if pod.seen.place is Place.LEAVING:
            pod.seen = replace(pod.seen, place=Place.OFF, used=0, away=pod.seen.used, stay_ns=0)
        else:
            pod.begun = True
            pod.seen = replace(pod.seen, place=Place.ON, used=pod.uses, away=0, stay_ns=0)
