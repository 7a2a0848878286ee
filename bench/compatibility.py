"""Ordinary programs in a pod: which of them break there, and what was refused.

    python bench/compatibility.py                         # as root on a GPU host; some five minutes
    python bench/compatibility.py --only torch,nvidia     # programs with these words in their names
    python bench/compatibility.py --record DIRECTORY      # also record the ioctls of each, run plainly

Each program of compatibility_programs.py runs plainly first, then in a pod: with a memory limit, but without one where
it needs RM's own mappings (graphics, video). Programs that draw run in a pod with --allow-graphics. A program is broken
if it succeeds plainly and fails in the pod. Debuggers and profilers run in a pod with --allow-profiling, and in one
without. They may fail there, if a line tells the reason and the remedy. Results: docs/results/compatibility.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compatibility_programs import GRAPHICS, NOT_HERE, PROGRAMS, REFUSABLE, TOOLS, UNLIMITED
from harness import QGPUCTL, ROOT, Bench

from qgpu.errors import QgpuError

_PROGRAMS = Path(__file__).with_name("compatibility_programs.py")
_RECORDER = Path(__file__).with_name("record_ioctls.c")
_GRANT = ("--memory", "16GiB")
_LIMIT_S = 150
#: How many programs run at the same time.
_AT_ONCE = 4
#: In the line of a refused tool (qgpu/guardian/rules/tools.py).
_REASON = "is refused in pods, because"
#: How long a pod stays after its program ends, so that the daemon reports its last refusals.
_STAY_S = 1


@dataclass(slots=True)
class Row:
    """What one program did plainly and in a pod: exit codes, the last lines of an error, and what was refused.

    A tool's pod has --allow-profiling, and its fields with ``ungranted`` are of a pod without.
    """

    program: str
    plain: int | None = None
    pod: int | None = None
    said: str = ""
    refused: str = ""
    ungranted: int | None = None
    said_ungranted: str = ""
    refused_ungranted: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def here(self) -> bool:
        """Tell whether the program can run on this host."""
        return self.plain == 0

    @property
    def broken(self) -> bool:
        """Tell whether the program runs plainly but not in a pod, and nobody tells why."""
        if self.program not in TOOLS:
            return self.here and self.pod != 0
        ends = ((self.pod, self.refused), (self.ungranted, self.refused_ungranted))
        may_be_refused = self.program in REFUSABLE
        return self.here and any(code != 0 and not (may_be_refused and _REASON in line) for code, line in ends)

    @property
    def works(self) -> bool:
        """Tell whether a tool works in a pod with --allow-profiling."""
        return self.program in TOOLS and self.here and self.pod == 0

    @property
    def refused_with_reason(self) -> bool:
        """Tell whether a tool was refused in a pod, with or without the grant, and its user told why."""
        ends = ((self.pod, self.refused), (self.ungranted, self.refused_ungranted))
        return self.program in TOOLS and any(code not in (0, None) and _REASON in line for code, line in ends)


def _run(command: list[str], environment: dict[str, str], log: Path) -> tuple[int, float]:
    """Run a program to its end, or kill it with all its children; return its exit code and the seconds it took."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, time.monotonic() - began


def _last(log: Path, lines: int = 1) -> str:
    said = [line[-200:] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(said[-lines:])


def _lines(program: str) -> int:
    """Return how many of the last lines of output to keep: a tool's error comes before its program's."""
    return 5 if program in TOOLS else 1


class Refusals(threading.Thread):
    """Keeps what the daemon last said about each pod."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(daemon=True)
        self._bench = bench
        self.said: dict[str, str] = {}
        self.done = False

    def run(self) -> None:
        """Ask until told to end."""
        while not self.done:
            with suppress(QgpuError):
                for pod in self._bench.pods():
                    if pod["problem"]:
                        self.said[pod["name"]] = pod["problem"]
            time.sleep(0.02)


def plainly(rows: Iterable[Row], bench: Bench, record: Path | None) -> None:
    """Run every program without qgpu, and record its ioctls if asked."""
    recorder = bench.directory / "recorder.so"
    if record is not None:
        compiler = ["cc", "-shared", "-fPIC", "-O2", "-o", str(recorder), str(_RECORDER), "-ldl", "-pthread"]
        subprocess.run(compiler, check=True)
        record.mkdir(parents=True, exist_ok=True)

    def one(row: Row) -> None:
        environment, log = bench.environment(), bench.directory / f"{row.program}.plain.log"
        if record is not None:
            environment |= {"LD_PRELOAD": str(recorder), "QGPU_RECORD": str(bench.directory / f"{row.program}.ioctls")}
        row.plain, seconds = _run([sys.executable, str(_PROGRAMS), row.program], environment, log)
        row.seconds.append(round(seconds, 2))
        row.said = "" if row.plain == 0 else _last(log, _lines(row.program))
        print(f"plain {row.program}: {row.plain} {row.said} ({seconds:.1f} s)", flush=True)
        if record is not None:
            _keep(bench.directory, row.program, record)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(one, rows))


def _keep(directory: Path, program: str, record: Path) -> None:
    """Store the recordings of a program's processes, the longest first, as one compressed file."""
    files = sorted(directory.glob(f"{program}.ioctls.*"), key=lambda file: -file.stat().st_size)
    with lzma.open(record / f"{program}.jsonl.xz", "wt") as out:
        for file in files[:1]:
            out.writelines(line for line in file.open() if line.startswith("{") and line.endswith("}\n"))


def in_pods(rows: Iterable[Row], bench: Bench) -> None:
    """Run every program that succeeded plainly in a pod of its own."""
    refusals = Refusals(bench)
    refusals.start()
    gpus = [word for gpu in range(len(bench.ask("gpu.list")["gpus"])) for word in ("--gpu", str(gpu))]

    def run(program: str, pod: str, *options: str) -> tuple[int, str, str, float]:
        """Run a program in a pod; return its exit code, what was wrong, what was refused, and the seconds it took."""
        log = bench.directory / f"{pod}.pod.log"
        limit = () if program in UNLIMITED else _GRANT
        command = [*QGPUCTL, "--runtime-dir", str(bench.runtime_dir), "run", "--name", pod, *gpus, *limit, *options]
        script = f'"$@"; code=$?; sleep {_STAY_S}; exit $code'
        command += ["--", "sh", "-c", script, "sh", sys.executable, str(_PROGRAMS), program]
        code, seconds = _run(command, bench.environment(), log)
        said = "" if code == 0 else _last(log, _lines(program))
        refused = refusals.said.get(pod, "")
        with_options = " ".join((pod, *options))
        print(f"pod {with_options}: {code} [{refused}] ({seconds:.1f} s)\n{said}".rstrip(), flush=True)
        return code, said, refused, round(seconds - _STAY_S, 2)

    def one(row: Row) -> None:
        options = ("--allow-profiling",) if row.program in TOOLS else ()
        options = ("--allow-graphics",) if row.program in GRAPHICS else options
        row.pod, row.said, row.refused, seconds = run(row.program, row.program, *options)
        row.seconds.append(seconds)
        if row.program in TOOLS:
            found = run(row.program, f"{row.program}-ungranted")
            row.ungranted, row.said_ungranted, row.refused_ungranted, _ = found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(one, [row for row in rows if row.here]))
    refusals.done = True
    refusals.join()


def main() -> int:
    """Run what was asked for, print a summary, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words in the names of programs, by comma")
    parser.add_argument("--record", type=Path, help="a directory for recorded ioctls")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "compatibility.json")
    options = parser.parse_args()
    words = options.only.split(",")
    rows = [Row(name) for name in PROGRAMS if any(word in name for word in words)]
    bench = Bench("seccomp")
    tempfile.tempdir = str(bench.directory)
    try:
        plainly(rows, bench, options.record)
        with bench.daemon():
            in_pods(rows, bench)
    finally:
        bench.close(options.record / "qgpud.log" if options.record else None)
    about = {
        "command": " ".join(["python bench/compatibility.py", *(["--only", options.only] if options.only else [])]),
        "date": time.strftime("%Y-%m-%d"),
        "driver": Path("/sys/module/nvidia/version").read_text().strip(),
    }
    figures = write(options.out, about, rows)
    print(json.dumps(figures))
    return 1 if figures["programs_broken"] else 0


def write(out: Path, about: dict[str, str], rows: Sequence[Row]) -> dict[str, int]:
    """Write the results, with older rows of programs that did not run this time; return the figures."""
    older = [Row(**row) for row in json.loads(out.read_text())["rows"]] if out.exists() else []
    by_name = {row.program: row for row in (*older, *rows)}
    known = [by_name[name] for name in PROGRAMS if name in by_name]
    ran = [row for row in known if row.here]
    figures = {
        "programs": sum(row.program not in REFUSABLE for row in ran),
        "programs_broken": sum(row.broken for row in ran),
        "tools": len(TOOLS),
        "tools_working": sum(row.works for row in ran),
        "tools_refused_with_reason": sum(row.refused_with_reason for row in ran),
        "tools_that_need_the_grant": sum(row.works and row.ungranted != 0 for row in ran),
        "programs_not_here": sum(row.plain == NOT_HERE for row in known),
        "programs_that_fail_plainly": sum(row.plain not in (0, NOT_HERE) for row in known),
    }
    content = {**about, "figures": figures, "rows": [asdict(row) for row in known]}
    out.write_text(json.dumps(content, indent=1) + "\n")
    return figures


if __name__ == "__main__":
    sys.exit(main())
