"""Shared by every script here: options, progress, independent sections, and results written at once.

A section is a function of the script that returns figures; it adds pictures to ``script.plots``. If one section fails,
the others still run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from figures import Figure, RunInfo, merge, write
from harness import ROOT, Bench
from plots import Plot, svg
from pods import BenchError, Pod, tail
from progress import Span
from provenance import sources

DRIVER = Path("/proc/driver/nvidia/version")
KERNELS = ("50us", "100us", "1ms", "100ms")


class NotHereError(Exception):
    """A section cannot be measured on this plane; says why."""


class Script:
    """One run: its tools, durations and results."""

    def __init__(self, bench: Bench, quick: bool) -> None:
        self.bench = bench
        self.scale = 0.5 if quick else 1.0
        self.began = time.monotonic()
        self.device = "simulated pGPU"
        self.plots: list[Plot] = []
        #: Rows that a section writes to a file of its own, in addition to its figures.
        self.rows: list[dict[str, Any]] = []
        self.told_to_end = False

    def say(self, text: str) -> None:
        """Print one line of progress."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def span(self, seconds: float) -> Span:
        """Measure for ``seconds``, or for half of it with ``--quick``."""
        return self.bench.span(seconds * self.scale)

    def settle(self, seconds: float = 1.0) -> None:
        """Let a change take effect."""
        time.sleep(seconds)

    def running(self, *pods: Pod) -> None:
        """Wait until pods run, and a little longer."""
        self.bench.wait_busy(*pods)
        self.settle()

    def running_outside(self, *pods: Pod) -> None:
        """Wait until loads outside of pods have run for a second."""
        for pod in pods:
            pod.wait_log('"elapsed_s"')

    def need_card(self) -> None:
        """Raise NotHereError on a simulated pGPU."""
        if self.bench.simulated:
            raise NotHereError("a simulated pGPU does not outlive its daemon, and nothing runs on it without one")

    def calibrate(self, kernels: Iterable[str] = KERNELS) -> None:
        """Calibrate the length of kernels once, alone, for all later processes."""
        if self.bench.simulated:
            return
        for kernel in kernels:
            if kernel in self.bench.iterations:
                continue
            result = self.bench.plain(*self.bench.load_options(kernel, "--count", "1"))
            self.bench.iterations[kernel] = result["iterations"]
            self.device = result["device"]
            self.say(f"{kernel}: {result['iterations']} iterations, {result['gpu_kernel_us']:.1f} us alone")


Section = Callable[[Script], list[Figure]]

#: The suite: the letter of each claim and its sections, in the order of reports.
CLAIMS = {
    "a": ("batch_curve", "batch_curve_builtin"),
    "b": ("share_error",),
    "c": ("online_latency",),
    "d": ("colocation",),
    "e": ("convergence",),
    "f": ("harvest",),
    "g": ("daemon_cost",),
    "h": ("stability",),
}

EVERY = [name for names in CLAIMS.values() for name in names]
#: The same, plus sections that run only when asked for: everything that can be merged into the results.
TOGETHER = [*EVERY, "batch_burst", "online_processes"]


def claim(sections: Mapping[str, Section], doc: str | None) -> None:
    """Run a script of the suite: each section has its results, and all in the folder are merged."""
    sys.exit(run("bench", sections, doc or "", apart=TOGETHER))


def run(name: str, sections: Mapping[str, Section], doc: str, *, apart: Sequence[str] = ()) -> int:
    """Run the requested sections and write their results; return the exit code.

    With ``apart`` (the sections of a whole suite) each section has its own file, and all files in the folder are
    merged.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plane", default="auto", choices=["auto", "sim", "seccomp", "kmod"])
    parser.add_argument("--only", help="sections: " + ", ".join(sections))
    parser.add_argument("--quick", action="store_true", help="halve the durations")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--name", help=f"of the result files; default h200-{name}, or sim-{name} on sim")
    options = parser.parse_args()
    plane = options.plane
    if plane == "auto":
        plane = "seccomp" if DRIVER.exists() else "sim"
    wanted = _wanted(options.only, sections, parser)
    stem = options.name or f"{'sim' if plane == 'sim' else 'h200'}-{name}"
    bench = Bench(plane)
    script = Script(bench, options.quick)

    def end(*_: object) -> None:
        script.told_to_end = True
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)
    command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *_what(sys.argv[1:])])
    digest = sources()
    figures: list[Figure] = []
    errors: dict[str, str] = {}
    failed = False

    def save(stem: str, since: float) -> None:
        date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        about = RunInfo(command, _driver(), date, script.device, plane, time.monotonic() - since, digest)
        write(options.out, stem, about, figures, errors, script.plots)

    try:
        script.calibrate()
        for section in wanted:
            script.say(f"-- {section}")
            began = time.monotonic()
            if apart:
                figures, errors, script.plots, script.rows = [], {}, [], []
            try:
                found = sections[section](script)
            except NotHereError as reason:
                script.say(f"{section}: left out: {reason}")
                continue
            except Exception as error:  # noqa: BLE001 (a section that fails must not cost the others)
                errors[section] = f"{type(error).__name__}: {error}"
                script.say(f"{section} failed: {errors[section]}; qgpud: {tail(bench.daemon_log, 10)}")
                found = []
            figures += found
            for figure in found:
                print(figure.row(), flush=True)
            # Write at once, because the caller may have a time limit.
            save(f"{stem}-{section}" if apart else stem, began if apart else script.began)
            if apart:
                merge(options.out, stem, apart)
                _picture(options.out / f"{stem}-{section}.svg", script.plots)
                keep_rows(options.out / f"{stem}-rows.json", section, script.rows)
            failed = failed or bool(errors) or any(figure.passed is False for figure in found)
            script.say(f"-- {section}: {time.monotonic() - began:.0f} s")
            if script.told_to_end:
                break
    except BenchError as error:
        script.say(f"calibration failed: {error}")
        failed = True
    finally:
        bench.close(keep_log=options.out / f"{stem}-qgpud.log" if errors else None)
    return 1 if failed else 0


def spread(name: object, values: Sequence[float]) -> tuple[object, float, float, float]:
    """Return a point of a plot: the median of repeats, with least and most."""
    return name, statistics.median(values), min(values), max(values)


def listed(values: Iterable[float]) -> str:
    """Return numbers for a line of progress."""
    return ", ".join(f"{value:.4g}" for value in values) or "-"


def keep_rows(file: Path, section: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of a section, if it has any, in a file that other sections write to as well."""
    if not rows:
        return
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    kept = [*(row for row in before if row["section"] != section), *rows]
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False, allow_nan=False)}" for row in kept)
    file.write_text(f'{{"rows": [\n{lines}\n]}}\n')


def _picture(file: Path, plots: Sequence[Plot]) -> None:
    if plots:
        with suppress(ImportError):  # report.py draws it from the results, where there is matplotlib
            file.write_text(svg(plots))


def _wanted(only: str | None, sections: Mapping[str, Section], parser: argparse.ArgumentParser) -> list[str]:
    if not only:
        return [name for name in sections if name in EVERY or name not in TOGETHER]
    asked = [name for part in only.split(",") for name in CLAIMS.get(part, (part,))]
    wanted = [name for name in asked if name in sections or name not in EVERY]
    if unknown := set(wanted) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    return wanted


def _what(arguments: Sequence[str]) -> list[str]:
    """Drop the options that say where results go: they do not affect what is measured."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(("--out", "--name")):
            kept.append(argument)
        skip = argument in ("--out", "--name")
    return kept


def _driver() -> str:
    try:
        text = DRIVER.read_text()
    except OSError:
        return "none"
    words = text.split()
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "unknown")
