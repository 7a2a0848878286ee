"""Measure on this machine what qgpu promises, through qgpud, qgpuctl and qgpu-load.

    python bench/spine.py                 # all of it, about seven minutes on a GPU (as root)
    python bench/spine.py --plane sim     # the same on a simulated pGPU: a rehearsal
    python bench/spine.py --only burst,online --quick

Every section stands alone: it starts its own daemon and pods, and if it fails the others still run. Results
go to docs/results as JSON (figures) and Markdown (with what was asked for, and the spread).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from figures import About, Figure, at_least, at_most, median, within, write
from harness import ROOT, Bench, BenchError, Pod, Progress, Span, tail

_OFFLINE = ("1ms", "100ms")


class Script:
    """The sections, each a method that returns its figures."""

    def __init__(self, bench: Bench, quick: bool) -> None:
        self.bench = bench
        self.scale = 0.5 if quick else 1.0
        self.began = time.monotonic()
        self.device = "unknown"

    def say(self, text: str) -> None:
        """Print one line of progress."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def span(self, seconds: float) -> Span:
        """Measure for ``seconds``, or half of it if in a hurry."""
        return self.bench.span(seconds * self.scale)

    def settle(self, seconds: float = 1.0) -> None:
        """Let a change take effect."""
        time.sleep(seconds)

    def running(self, *pods: Pod) -> None:
        """Wait until pods run, and a little longer."""
        self.bench.wait_busy(*pods)
        self.settle()

    def calibrate(self) -> None:
        """Find the length of kernels once, alone, for all processes to come."""
        if self.bench.simulated:
            self.device = "simulated pGPU"
            return
        for kernel in ("50us", "100us", "1ms", "100ms"):
            result = self.bench.plain(*self.bench.load_options(kernel, "--count", "1"))
            self.bench.iterations[kernel] = result["iterations"]
            self.device = result["device"]
            self.say(f"{kernel}: {result['iterations']} iterations, {result['gpu_kernel_us']:.1f} us alone")

    # Sections

    def alone(self) -> list[Figure]:
        """Compare a load without qgpu to one in a pod that is alone: speed and start-up, in turn."""
        options = self.bench.load_options("1ms", "--warmup", "300ms", "--duration", f"{1500 * self.scale:.0f}ms")
        rates: list[float] = []
        starts: list[tuple[float, float]] = []
        for turn in range(7):
            plain = self.bench.plain(*options)
            with self.bench.daemon():
                self.bench.policy("burst-share")
                pod = self.bench.run_pod(*options)
            rates.append(pod["kernels_per_s"] / plain["kernels_per_s"])
            starts.append((plain["startup_s"], pod["startup_s"]))
            self.say(f"alone {turn + 1}/7: {rates[-1]:.4f}, start-up {starts[-1][0]:.3f} s, {starts[-1][1]:.3f} s")
        plain_s, pod_s = (statistics.median(column) for column in zip(*starts, strict=True))
        startup, holds = pod_s / plain_s, at_most(1.10)
        each = tuple(pod / plain for plain, pod in starts)
        note = f"median {pod_s * 1000:.0f} ms in a pod, {plain_s * 1000:.0f} ms plain, exec to first kernel done"
        return [
            median("alone_ratio", rates, *at_least(0.995), note="1 ms kernels, pod alone over plain, pairs in turn"),
            Figure("startup_ratio", startup, each, holds[0], holds[1](startup), note),
        ]

    def burst(self) -> list[Figure]:
        """Two pods under Burst Share, quotas changed live, between two stretches of one alone."""
        figures: list[Figure] = []
        totals: list[float] = []
        for kernel, splits in {
            "50us": [(66, 33)],
            "1ms": [(66, 33), (70, 30), (90, 10)],
            "100ms": [(66, 33)],
        }.items():
            ratios, total = self._pair(kernel, splits, 6 if kernel == "100ms" else 4)
            totals.append(statistics.median(total))
            names = {
                (66, 33): f"burst_ratio_2_1_{kernel}",
                (70, 30): "burst_ratio_70_30",
                (90, 10): "burst_ratio_90_10",
            }
            for split, (kernels, gpu_time) in ratios.items():
                note = f"{kernel} kernels; by GPU time {statistics.median(gpu_time):.3f}"
                figures.append(median(names[split], kernels, *within(split[0] / split[1]), note=note))
        note = "both over one alone, quotas 2:1, least of 50 µs, 1 ms, 100 ms: " + ", ".join(f"{t:.3f}" for t in totals)
        return [*figures, median("burst_total", totals, *at_least(0.96), note=note, pick=min)]

    def gaps(self) -> list[Figure]:
        """Pods that wait for each batch and leave tiny gaps, where timeslices alone would not bind."""
        gappy = ("--batch", "5", "--gap", "50us")
        with self.bench.daemon():
            self.bench.policy("burst-share")
            a = self.bench.pod("a", "1ms", *gappy, cores=66)
            self.running(a)
            alone = self.span(2.5)
            b = self.bench.pod("b", "1ms", *gappy, cores=33)
            self.running(b)
            self.settle(2)
            pair = [self.span(4) for _ in range(2)]
            done_b = b.stop()
            flood = self.bench.pod("c", "1ms", cores=33)
            self.running(flood)
            self.settle(2)
            beside = [self.span(4) for _ in range(2)]
            done_c, done_a = flood.stop(), a.stop()
        speed = done_a.rate(alone)
        ratios = [done_a.rate(span) / done_b.rate(span) for span in pair]
        totals = [(done_a.rate(span) + done_b.rate(span)) / speed for span in pair]
        flooded = [done_a.rate(span) / done_c.rate(span) for span in beside]
        self.say(f"gaps 66:33: {_list(ratios)}, total {_list(totals)}; beside a flood {_list(flooded)}")
        note = "each pod launches 5 ms of work, waits for it, pauses 50 µs"
        return [
            median("gaps_ratio_2_1", ratios, *within(2.0), note=note),
            median("gaps_total", totals, note="both over one alone"),
            median("gaps_beside_flood_2_1", flooded, *within(2.0), note="the other pod floods"),
        ]

    def _pair(
        self, kernel: str, splits: Sequence[tuple[int, int]], seconds: float
    ) -> tuple[dict[tuple[int, int], tuple[list[float], list[float]]], list[float]]:
        spans: dict[tuple[int, int], list[Span]] = {split: [] for split in splits}
        with self.bench.daemon():
            self.bench.policy("burst-share")
            a = self.bench.pod("a", kernel, cores=66)
            self.running(a)
            alone = [self.span(2.5)]
            b = self.bench.pod("b", kernel, cores=33)
            self.running(b)
            for _ in range(2):
                for split in splits:
                    self.bench.cores(a=split[0], b=split[1])
                    self.settle()
                    spans[split].append(self.span(seconds))
            done_b = b.stop()
            self.settle()
            alone.append(self.span(2.5))
            done_a = a.stop()
        speed = statistics.mean(done_a.rate(span) for span in alone)
        ratios = {}
        for split, measured in spans.items():
            by_kernels = [done_a.rate(span) / done_b.rate(span) for span in measured]
            by_time = [_ratio(span.used_ns["a"], span.used_ns["b"]) for span in measured]
            ratios[split] = (by_kernels, by_time)
            self.say(f"burst {kernel} {split[0]}:{split[1]}: {_list(by_kernels)}; GPU time {_list(by_time)}")
        total = [(done_a.rate(span) + done_b.rate(span)) / speed for span in spans[splits[0]]]
        self.say(f"burst {kernel} total: {_list(total)}")
        return ratios, total

    def shares(self) -> list[Figure]:
        """Three pods under Burst Share, 5:3:2."""
        asked = {"a": 50, "b": 30, "c": 20}
        with self.bench.daemon():
            self.bench.policy("burst-share")
            pods = [self.bench.pod(name, "1ms", cores=cores) for name, cores in asked.items()]
            self.running(*pods)
            spans = [self.span(4) for _ in range(2)]
            done = [pod.stop() for pod in pods]
        measured = [_shares(done, span) for span in spans]
        errors = [
            max(abs(share * 100 / cores - 1) for share, cores in zip(found, asked.values(), strict=True))
            for found in measured
        ]
        self.say(f"shares 5:3:2: {[_list(found) for found in measured]}")
        middle = [statistics.median(column) for column in zip(*measured, strict=True)]
        holds = max(abs(share * 100 / cores - 1) for share, cores in zip(middle, asked.values(), strict=True)) <= 0.03
        return [
            Figure("burst_shares_5_3_2", middle, (), "0.5, 0.3, 0.2 ± 3%", holds, "1 ms kernels"),
            median("burst_shares_5_3_2_error", errors, *at_most(0.03), note="worst relative error", pick=max),
        ]

    def fixed(self) -> list[Figure]:
        """One pod alone under Fixed Share 30 %, in turn with the same pod let free."""
        free: list[Span] = []
        held: list[Span] = []
        with self.bench.daemon():
            pod = self.bench.pod("a", "1ms", cores=30)
            self.bench.policy("burst-share")
            self.running(pod)
            for _ in range(2):
                self.bench.policy("burst-share")
                self.settle()
                free.append(self.span(2))
                self.bench.policy("fixed-share")
                self.settle(1.5)
                held.append(self.span(5))
            done = pod.stop()
        shares = [done.rate(fixed) / done.rate(alone) for fixed, alone in zip(held, free, strict=True)]
        self.say(f"fixed 30 %: {_list(shares)}")
        return [
            median(
                "fixed_30_alone", shares, "0.30 ± 0.01", lambda v: abs(v - 0.3) <= 0.01, "1 ms kernels, 100 ms period"
            )
        ]

    def best_effort(self) -> list[Figure]:
        """Two, four, eight pods without quotas; with eight, the daemon's CPU."""
        spans: dict[int, list[Span]] = {}
        with self.bench.daemon():
            self.bench.policy("best-effort")
            pods: list[Pod] = []
            for count in (2, 4, 8):
                pods += (fresh := [self.bench.pod(f"p{n}", "1ms") for n in range(len(pods), count)])
                self.running(*fresh)
                cpu_s, began = self.bench.cpu_s(), time.monotonic()
                spans[count] = [self.span(4) for _ in range(2)]
                cpu_percent = (self.bench.cpu_s() - cpu_s) / (time.monotonic() - began) * 100
            done = [pod.stop() for pod in pods]
        figures = []
        for count, measured in spans.items():
            rates = [[progress.rate(span) for progress in done[:count]] for span in measured]
            spread = [(max(rate) - min(rate)) / statistics.mean(rate) for rate in rates]
            self.say(f"best effort, {count} pods: spread {_list(spread)}, total {_list([sum(r) for r in rates])}/s")
            note = "1 ms kernels, (most - least) / mean"
            figures.append(median(f"best_effort_spread_{count}", spread, *at_most(0.02), note=note))
        self.say(f"daemon and helpers with 8 pods: {cpu_percent:.2f} % of a core")
        required, holds = at_most(5, " %")
        note = "daemon, guardian and what else of qgpu runs, 8 busy pods"
        if self.bench.simulated:
            # Here the daemon is the card as well, and is asked for progress by every load.
            return [*figures, Figure("daemon_cpu_percent", cpu_percent, note=f"{note}; with the card it simulates")]
        return [*figures, Figure("daemon_cpu_percent", cpu_percent, (), required, holds(cpu_percent), note)]

    def online(self) -> list[Figure]:
        """Measure an online pod's latency alone and over one and four offline floods, and what they keep."""
        p99: dict[str, list[float]] = {"alone": []}
        kept: dict[str, list[float]] = {}
        with self.bench.daemon():
            self.bench.policy("best-effort")
            p99["alone"].append(self._online_run()[1])
            for kernel in _OFFLINE:
                flood = self.bench.pod("flood", kernel)
                self.running(flood)
                alone = [self.span(2)]
                runs = [self._online_run() for _ in range(2)]
                self.settle()
                alone.append(self.span(2))
                fours: list[Span] = []
                others: list[Pod] = []
                if kernel == "1ms":
                    others = [self.bench.pod(f"flood{n}", kernel) for n in range(3)]
                    self.running(*others)
                    four_runs = [self._online_run() for _ in range(2)]
                    fours = [span for span, _ in four_runs]
                    p99["four"] = [latency for _, latency in four_runs]
                done_others = [pod.stop() for pod in others]
                done = flood.stop()
                speed = statistics.mean(done.rate(span) for span in alone)
                p99[kernel] = [latency for _, latency in runs]
                kept[kernel] = [done.rate(span) / speed for span, _ in runs]
                if fours:
                    kept["four"] = [sum(p.rate(span) for p in (done, *done_others)) / speed for span in fours]
                p99["alone"].append(self._online_run()[1])
        for case, values in p99.items():
            self.say(f"online p99 {case}: {_list(values)} us; offline kept {_list(kept.get(case, []))}")
        return _online_figures(p99, kept)

    def _online_run(self) -> tuple[Span, float]:
        """Run an online pod for a while; return when it was busy, and its p99 in us."""
        seconds = f"{6000 * self.scale:.0f}ms"
        pod = self.bench.pod(
            "online", "100us", "--period", "10ms", "--warmup", "500ms", "--duration", seconds, pod_class="online"
        )
        result = pod.finish().result
        return Span(result["started_ns"] / 1e9, result["ended_ns"] / 1e9, {}), result["latency_us"]["p99"]

    def kill9(self) -> list[Figure]:
        """Kill the daemon while a gate is closed, and see how soon the pod runs at full speed."""
        seconds: list[float] = []
        for turn in range(6):
            with self.bench.daemon():
                self.bench.policy("fixed-share", "2s")
                pod = self.bench.pod("a", "1ms", cores=10)
                self.bench.wait_busy(pod)
                self.settle(2.5)
                self.bench.wait_gated(pod)
                killed_at = self.bench.kill_daemon()
                self.settle(3)
                done = pod.stop()
            if not done.between(killed_at - 0.1, killed_at):
                seconds.append(_recovery_s(done, killed_at))
                self.say(f"kill -9 {turn + 1}: full speed after {seconds[-1]:.2f} s")
            else:
                self.say(f"kill -9 {turn + 1}: the gate was open, does not count")
            if len(seconds) == 3:
                break
        if not seconds:
            raise BenchError("the gate was open each time the daemon was killed")
        note = "Fixed Share 10 %, period 2 s, killed while the gate was closed; worst; seen to 10 ms"
        return [median("kill9_recovery_s", seconds, *at_most(1, " s"), note=note, pick=max)]

    def gated_kill(self) -> list[Figure]:
        """Kill a pod while its gate is closed; what its neighbour gets after, over before."""
        kept: list[float] = []
        for _ in range(2):
            with self.bench.daemon():
                self.bench.policy("fixed-share", "200ms")
                a = self.bench.pod("a", "1ms", cores=50)
                b = self.bench.pod("b", "1ms", cores=10)
                self.running(a, b)
                before = self.span(3)
                self.bench.wait_gated(b)
                b.load_process().send_signal(signal.SIGKILL)
                after = self.span(3)
                done = a.stop()
            kept.append(done.rate(after) / done.rate(before))
            self.say(f"gated pod killed: neighbour at {kept[-1]:.3f}")
        worst = min(kept, key=lambda value: -abs(value - 1))
        note = "Fixed Share 50 % beside 10 %; 3 s after SIGKILL over 3 s before; worst"
        return [median("gated_kill_neighbour", kept, *within(1.0), note=note, pick=lambda _: worst)]

    def restart(self) -> list[Figure]:
        """Kill the daemon under two pods and start another: it should know them, and share between them."""
        with self.bench.daemon():
            self.bench.policy("burst-share")
            a = self.bench.pod("a", "1ms", cores=66)
            b = self.bench.pod("b", "1ms", cores=33)
            self.running(a, b)
            self.bench.kill_daemon()
            self.settle(1.5)
            self.bench.start_daemon()
            self.settle(2)
            text = self.bench.ctl("pod", "list", "-o", "json")
            known = {pod["name"]: pod for pod in self.bench.pods()}
            found = all(f'"{pod.name}"' in text and known.get(pod.name, {}).get("pids") for pod in (a, b))
            self.say(
                f"restarted: pods found: {found}; " + "; ".join(f"{p['name']}: {p['trouble']}" for p in known.values())
            )
            self.bench.policy("burst-share")
            self.settle(2)
            span = self.span(4)
            done_a, done_b = a.stop(), b.stop()
        ratio = done_a.rate(span) / done_b.rate(span)
        self.say(f"restarted: ratio {ratio:.3f}")
        return [
            Figure("restart_finds_pods", found, (), "true", found, "running, with their processes, in `pod list`"),
            median("restart_ratio_2_1", [ratio], note="quotas 66:33 again in force after kill -9 and a new daemon"),
        ]


def _online_figures(p99: dict[str, list[float]], kept: dict[str, list[float]]) -> list[Figure]:
    alone_us = statistics.median(p99["alone"])
    limit = at_most(alone_us + 300)
    note = "100 µs kernel every 10 ms, launch to synchronised; worst of the runs"
    figures = [median("online_alone_p99_us", p99["alone"], note="the same, no other pod, between the other runs")]
    cases = (*_OFFLINE, "four")
    figures += [median(f"online_p99_us_{case}", p99[case], *limit, note=note, pick=max) for case in cases]
    figures.append(median("online_p99_us", [max(p99[case]) for case in cases], *limit, note="worst case", pick=max))
    for case in cases:
        least = at_least(0.90 if case == "four" else 0.93)
        figures.append(median(f"offline_kept_{case}", kept[case], *least, note="over one offline pod alone"))
    one = [statistics.median(kept[case]) for case in _OFFLINE]
    figures.append(median("offline_kept", one, *at_least(0.93), note="least of one offline pod's", pick=min))
    return figures


def _recovery_s(done: Progress, killed_at: float) -> float:
    """Return how long after ``killed_at`` half a second at full speed begins."""
    full = max(done.between(killed_at + n / 10, killed_at + n / 10 + 0.5) for n in range(25))
    for n in range(250):
        start = killed_at + n / 100
        if done.between(start, start + 0.5) >= 0.9 * full and done.between(start, start + 0.02):
            return n / 100
    raise BenchError("never at full speed again")


def _shares(done: Sequence[Progress], span: Span) -> list[float]:
    rates = [progress.rate(span) for progress in done]
    return [rate / sum(rates) for rate in rates]


def _ratio(a: int, b: int) -> float:
    return a / b if b else float("nan")


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values) or "-"


_SECTIONS: dict[str, Callable[[Script], list[Figure]]] = {
    name: getattr(Script, name)
    for name in ("burst", "gaps", "online", "alone", "fixed", "shares", "best_effort", "kill9", "gated_kill", "restart")
}
#: A simulated pGPU does not outlive its daemon, and nothing runs on it without one.
_NOT_ON = {"sim": ("alone", "kill9", "restart")}


def main() -> int:
    """Run the sections asked for and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plane", default="auto", choices=["auto", "sim", "seccomp", "kmod"])
    parser.add_argument("--only", help="sections: " + ", ".join(_SECTIONS))
    parser.add_argument("--quick", action="store_true", help="halve the durations")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--name", help="of the result files; default h200-spine, or sim-spine on sim")
    options = parser.parse_args()
    plane = options.plane
    if plane == "auto":
        plane = "seccomp" if Path("/proc/driver/nvidia/version").exists() else "sim"
    wanted = (
        options.only.split(",") if options.only else [name for name in _SECTIONS if name not in _NOT_ON.get(plane, ())]
    )
    if unknown := set(wanted) - set(_SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(_SECTIONS)}")
    bench = Bench(plane)
    script = Script(bench, options.quick)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: list[Figure] = []
    errors: dict[str, str] = {}
    command = " ".join(["python bench/spine.py", *map(shlex.quote, _what(sys.argv[1:]))])
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    stem = options.name or ("sim-spine" if plane == "sim" else "h200-spine")

    def save() -> None:
        about = About(command, _driver(), date, script.device, plane, time.monotonic() - script.began)
        write(options.out, stem, about, figures, errors)

    try:
        script.calibrate()
        for name in wanted:
            script.say(f"-- {name}")
            try:
                figures += _SECTIONS[name](script)
            except Exception as error:  # noqa: BLE001 (a section that fails must not cost the others)
                errors[name] = f"{type(error).__name__}: {error}"
                script.say(f"{name} failed: {errors[name]}; qgpud: {tail(bench.daemon_log, 10)}")
            save()  # now, for whoever runs this may have a limit of their own
    except BenchError as error:
        errors["calibrate"] = str(error)
        script.say(f"calibration failed: {error}")
        save()
    finally:
        bench.close(keep_log=options.out / f"{stem}-qgpud.log" if errors else None)
    for figure in figures:
        print(figure.row())
    return 1 if errors or any(figure.passed is False for figure in figures) else 0


def _what(arguments: Sequence[str]) -> list[str]:
    """Leave out where results go: it is no part of what was measured."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(("--out", "--name")):
            kept.append(argument)
        skip = argument in ("--out", "--name")
    return kept


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    words = text.split()
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "unknown")


if __name__ == "__main__":
    sys.exit(main())
