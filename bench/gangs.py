"""A pod on two GPUs that computes and reduces over both, beside a flood on each: with qgpu, and without.

python bench/gangs.py        # as root, with two GPUs and torch
"""

from __future__ import annotations

import sys

from figures import Figure, at_least, median
from harness import ROOT, Bench
from pods import stop_all
from progress import Progress, Span
from script import NotHereError, Script, run

_COMMAND = (sys.executable, str(ROOT / "bench" / "collective.py"))
_READY_S = 60.0


def gangs(script: Script) -> list[Figure]:
    """Give a pod on two GPUs half of each, with its turns on both at once."""
    if script.bench.simulated:
        raise NotHereError("collective kernels are not simulated; tests/planes/sim/test_gangs.py shows the turns")
    bench = script.bench
    with bench.daemon():
        if len(bench.ask("gpu.list")["gpus"]) < 2:
            raise NotHereError("there is one GPU only")
        gang = bench.start_pod("gang", _ranks(bench, "together"), cores=50, gpus=(0, 1))
        gang.wait_log("ready", _READY_S)
        script.settle()
        alone = script.span(5)
        floods = [bench.pod(f"flood-{n}", "1ms", cores=50, gpus=(n,)) for n in range(2)]
        script.running(*floods)
        script.settle(3)
        spans = [script.span(5) for _ in range(2)]
        for pod in bench.pods():
            script.say(
                f"  {pod['name']}: {[(use['gpu'], use['used_ns'] // 1_000_000) for use in pod['usage']]} ms used"
            )
        done = stop_all(gang, *floods)
    steps = done[0].rate(alone)
    _tell(script, "together", spans, done, steps)
    note = "steps of four products and an all-reduce over one alone, half of each GPU, a flood of 1 ms kernels on each"
    rates = [sum(flood.rate(span) for flood in done[1:]) / 2 for span in spans]
    return [
        median("gang_kept", [done[0].rate(span) / steps for span in spans], *at_least(0.45), note=note),
        median("gang_flood_rate", rates, note="kernels of 1 ms a second, mean of both floods, beside the gang"),
    ]


def plainly(script: Script) -> list[Figure]:
    """Run the same without qgpu."""
    if script.bench.simulated:
        raise NotHereError("collective kernels are not simulated")
    bench = script.bench
    gang = bench.start_outside("gang", _ranks(bench, "plain"))
    gang.wait_log("ready", _READY_S)
    script.settle()
    alone = script.span(4)
    floods = [bench.outside(f"flood-{n}", "1ms", environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(2)]
    script.running_outside(*floods)
    spans = [script.span(4) for _ in range(2)]
    done = stop_all(gang, *floods)
    steps = done[0].rate(alone)
    _tell(script, "plainly", spans, done, steps)
    note = "the same without qgpu"
    return [median("gang_plain_kept", [done[0].rate(span) / steps for span in spans], note=note)]


def _ranks(bench: Bench, name: str) -> list[str]:
    return [*_COMMAND, "--ranks", "2", "--store", str(bench.directory / f"store-{name}")]


def _tell(script: Script, how: str, spans: list[Span], done: list[Progress], alone: float) -> None:
    for span in spans:
        floods = ", ".join(f"{each.rate(span):.0f}" for each in done[1:])
        script.say(f"{how}: {done[0].rate(span):.1f} steps/s of {alone:.1f} alone; floods {floods} kernels/s")


if __name__ == "__main__":
    sys.exit(run("gangs", {"gangs": gangs, "plainly": plainly}, __doc__ or ""))
