"""The pictures of docs/policies.md, from the simulator: real policies and loop, with recorded context switches.

    python bench/policy_pictures.py [--out docs/results]

One drawing per policy: pods' shares over ten seconds, and 0.4 s of them switch by switch. Then 0.2 s of an online pod
over two offline ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from qgpu.load.workload import Workload
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, PodClass
from qgpu.planes.sim.host import SimHost
from qgpu.policies.registry import compose
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger
from qgpu.trace.chart import STYLE, Line, Strip, over_time, strips
from qgpu.trace.recorder import Recorder
from qgpu.trace.recording import GpuTrack, shares

FLOOD = Workload(kernel_us=1000, batch=0)
PULSE = Workload(kernel_us=2000, batch=1, period_us=10_000)
_COLOUR = {"two": "var(--c0)", "one": "var(--c1)", "chat": "var(--c3)"}
_PERIOD_NS = 100 * NS_PER_MS
_STEP_NS = 500 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class PodStay:
    """A pod's stay."""

    pod: str
    grant: Grant
    load: Workload
    from_s: float = 0.0
    to_s: float = 99.0


OFFLINE = (
    PodStay("two", Grant(cores=60), FLOOD),
    PodStay("one", Grant(cores=30), FLOOD, 2.0, 7.0),
)
ONLINE = (*OFFLINE, PodStay("chat", Grant(PodClass.ONLINE), PULSE, 4.0, 6.0))


def play(policy: str, stays: Sequence[PodStay], seconds: float) -> GpuTrack:
    """Run pods for their stays under a policy, and return what was recorded from time 0 on."""
    host, recorder, track = SimHost(), Recorder(0), GpuTrack(0)
    backend, ledger = host.backend(0), Ledger(0)
    backend.detailed = True
    loads: dict[str, int] = {}
    settings = loop.Settings(compose(policy, "best-effort"), _PERIOD_NS)
    while (now_s := backend.now_ns / NS_PER_S) < seconds + 0.3:
        for stay in stays:
            if stay.from_s <= now_s < stay.to_s and stay.pod not in loads:
                host.admit(stay.pod, {0: stay.grant})
                loads[stay.pod] = host.start_load(stay.pod, 0, stay.load)
            elif now_s >= stay.to_s and stay.pod in loads:
                host.stop_load(loads.pop(stay.pod))
                host.retire(stay.pod)
        ledger = loop.tick(backend, settings, ledger)
        recorder.watch(ledger, 0)
    for tick in recorder.fetch():
        track.add(tick)
    return track


def drawing(
    title: str, track: GpuTrack, stays: Sequence[PodStay], close: tuple[float, float], whole: bool = True
) -> str:
    """Draw shares over time, and below them a part of it switch by switch."""
    seconds = float(round(track.last_ns / NS_PER_S))
    lines, rows = [], []
    for stay in stays:
        pod = track.pods[stay.pod]
        found = shares(pod.runs, _STEP_NS, int(seconds * NS_PER_S), _STEP_NS)  # the first ticks are not recorded
        points = [((at_ns + _STEP_NS / 2) / NS_PER_S, share) for at_ns, share in found]
        asked = None if stay.grant.cores is None else stay.grant.cores / 100
        lines.append(Line(stay.pod, _COLOUR[stay.pod], points, asked))
        spans, closed = (
            [(start / NS_PER_S - close[0], end / NS_PER_S - close[0]) for start, end in found]
            for found in (pod.runs, pod.closed)
        )
        rows.append(Strip(stay.pod, _COLOUR[stay.pod], spans, closed))
    legend = "   ".join(f"{stay.pod}: {_asked(stay)}" for stay in stays)
    parts = [over_time(lines, seconds)] if whole else []
    parts.append(strips(rows, close[1] - close[0]))
    return _stacked(f"{title}.  {legend}", parts, [_key(stay) for stay in stays])


def _asked(stay: PodStay) -> str:
    return stay.grant.pod_class.value + ("" if stay.grant.cores is None else f", {stay.grant.cores} % asked")


def _key(stay: PodStay) -> tuple[str, str]:
    return f"{stay.pod} ({_asked(stay)})", _COLOUR[stay.pod]


def _stacked(title: str, parts: Sequence[str], keys: Sequence[tuple[str, str]]) -> str:
    """Put drawings below each other, with a title and what colours mean."""
    top, body, left = 30.0, list[str](), 52.0
    body.append(f'<text x="{left}" y="16" class="title">{escape(title.split(".")[0])}</text>')
    at = left + 150
    for name, colour in keys:
        body.append(f'<rect x="{at}" y="8" width="10" height="10" rx="2" fill="{colour}"/>')
        body.append(f'<text x="{at + 15}" y="17">{escape(name)}</text>')
        at += 40 + 6.2 * len(name)
    for part in parts:
        height = float(part.split('viewBox="0 0 900 ')[1].split('"')[0])
        body.append(part.replace("<svg ", f'<svg y="{top}" width="900" height="{height}" ', 1))
        top += height + 4
    style = f"{STYLE} .title {{ font-weight: 600; fill: var(--ink); font-size: 13px; }}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {top:.0f}" width="900" height="{top:.0f}">'
    return f"{head}<style>{style}</style>{''.join(body)}</svg>\n"


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for policy in ("best-effort", "burst-share", "fixed-share"):
        picture = drawing(policy, play(policy, ONLINE, 10.0), ONLINE, (3.0, 3.4))
        (options.out / f"policy-{policy}.svg").write_text(picture)
    online = drawing("online first", play("burst-share", ONLINE, 6.0), ONLINE, (5.0, 5.2), whole=False)
    (options.out / "policy-online.svg").write_text(online)


if __name__ == "__main__":
    main()
