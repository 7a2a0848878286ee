"""Two processes that infer with batches of any size: measures each size, one alone and both together.

A span is so long that the second pod, with a third of the card, has time for 64 batches. progress.py weighs counts
towards the middle of the span. So the ratio of both pods has a random error of 0.1 % (standard deviation; one span in a
hundred 0.3 %), whatever the phase of batches and turns. With spans of 1.8 s for batches of 256 the error was 0.6 and
1.7 %, against limits of 2 %. tests/bench checks this. Events on the host add errors. So figures are medians of several
spans, on which a single stall of tens of ms has no effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from inference import IMAGE_US, Batch, ask
from pods import Pod, stop_all
from progress import Progress, Span, ratio
from script import Script

from qgpu.model import NS_PER_S, NS_PER_US

QUOTAS = {"a": 66, "b": 33}
_REST = Batch(0)
#: A span has time for this many batches of the second pod, and is no shorter than this.
_BATCHES, _LEAST_S = 64, 1.5
_PART = 1 / 3
_ALONE_S = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """By batch size: when the pair ran, and when the first pod ran alone if that was measured too."""

    pairs: Mapping[int, Sequence[Span]]
    alone: Mapping[int, Span]
    #: What both did; set once they have ended.
    done: Sequence[Progress]
    #: When they ran with quotas exchanged.
    exchanged: Mapping[int, Sequence[Span]] = field(default_factory=dict)

    def ratios(self, size: int) -> list[float]:
        """Return, for each repeat, the images of the pod with the larger quota over those of the other."""
        a, b = self.done
        return self._in_both_roles(size, lambda span: ratio(a.rate(span), b.rate(span)))

    def by_gpu_time(self, size: int) -> list[float]:
        """Return the same ratio by GPU time; nothing without a ledger."""
        if not all(span.used_ns for span in self.pairs[size]):
            return []
        return self._in_both_roles(size, lambda span: ratio(span.used_ns["a"], span.used_ns["b"]))

    def rates(self, size: int) -> list[float]:
        """Return images per second of both together, in each repeat and role."""
        return [sum(rates) for rates in zip(*self.images(size), strict=True)]

    def launching_ms(self, size: int) -> list[list[float]]:
        """Return how long the host of each pod took to launch a batch, in each repeat and role."""
        return [[progress.launching_ms(span) for span in self._spans(size)] for progress in self.done]

    def launching_alone_ms(self, size: int) -> float:
        """Return the launch time of the pod that was measured alone."""
        return self.done[0].launching_ms(self.alone[size])

    def images(self, size: int) -> list[list[float]]:
        """Return images per second of each pod, in each repeat and role."""
        return [[progress.rate(span) for span in self._spans(size)] for progress in self.done]

    def _spans(self, size: int) -> list[Span]:
        return [*self.pairs[size], *self.exchanged.get(size, ())]

    def _in_both_roles(self, size: int, of: Callable[[Span], float]) -> list[float]:
        """Return the ratio in each repeat, or its geometric mean over both roles if both were measured.

        If pods wait for their CPUs, a pod with a faster CPU gets more out of the same GPU time. The mean cancels that
        advantage, but not the effect of the larger quota.
        """
        once = [of(span) for span in self.pairs[size]]
        again = [of(span) for span in self.exchanged.get(size, ())]
        return [math.sqrt(there / back) for there, back in zip(once, again, strict=True)] if again else once


class Pair:
    """Two processes that infer, and the commands they get."""

    def __init__(self, script: Script, pods: Sequence[Pod], sizes: Sequence[int]) -> None:
        self._script = script
        self._pods = pods
        self._sizes = sizes
        self._done: list[Progress] = []

    def ask(self, *batches: Batch) -> None:
        """Ask for batches of these sizes."""
        for pod, batch in zip(self._pods, batches, strict=True):
            ask(pod.file, batch)

    def row(
        self,
        *,
        graph: bool,
        sizes: Sequence[int] | None = None,
        alone: bool = False,
        rest_s: float = 0.0,
        settle_s: float,
        spans: int,
        brief: bool = False,
        both_roles: bool = False,
    ) -> Measured:
        """Measure sizes, this many times: the first pod alone if asked, then both; ``brief``: for a second."""
        script = self._script
        pairs: dict[int, list[Span]] = {}
        exchanged: dict[int, list[Span]] = {}
        singles: dict[int, Span] = {}
        for size in sizes or self._sizes:
            batch = Batch(size, graph)
            self.ask(_REST, _REST)
            script.settle(rest_s)
            if alone:
                self.ask(batch, _REST)
                script.settle(0.4)
                singles[size] = script.span(_ALONE_S)
            self.ask(batch, batch)
            script.settle(settle_s)
            seconds = _ALONE_S if brief else max(_LEAST_S, _BATCHES * size * IMAGE_US * NS_PER_US / NS_PER_S / _PART)
            pairs[size] = [script.span(seconds) for _ in range(spans)]
            if both_roles:
                self._cores(a=QUOTAS["b"], b=QUOTAS["a"])
                script.settle()
                exchanged[size] = [script.span(seconds) for _ in range(spans)]
                self._cores(b=QUOTAS["b"], a=QUOTAS["a"])
        self.ask(_REST, _REST)
        return Measured(pairs, singles, self._done, exchanged)

    def _cores(self, **quotas: int) -> None:
        """Set quotas, shrinking ones first."""
        for name, cores in quotas.items():
            self._script.bench.ask("pod.set", name=name, cores=cores)

    def end(self) -> None:
        """End both processes and collect what they did."""
        self._done += stop_all(*self._pods)


@contextmanager
def pair(script: Script, engine: str, sizes: Sequence[int], start: Callable[[str, list[str]], Pod]) -> Iterator[Pair]:
    """Start both and wait until each has run all sizes once; end them if they were not ended."""
    bench = script.bench
    command = [sys.executable, str(Path(__file__).with_name("inference.py")), "--engine", engine]
    command += ["--sizes", ",".join(map(str, sizes)), "--window-ms", "50" if bench.simulated else "10"]
    if engine == "kernels" and not bench.simulated:
        script.calibrate([f"{IMAGE_US}us"])
        command += ["--iterations", str(bench.iterations[f"{IMAGE_US}us"])]
    pods = [start(name, command) for name in QUOTAS]
    both = Pair(script, pods, sizes)
    both.ask(_REST, _REST)
    for pod in pods:
        pod.wait_log("ready", 90)
    script.say(f"{engine}: both are ready")
    try:
        yield both
    finally:
        bench.end_pods()
