"""What a hostile or failing pod can do to its quota and to its neighbour: tries every known way and judges the effect.

    python bench/isolation.py                    as root on a GPU host: plane seccomp
    python bench/isolation.py --plane kmod       likewise: the module, which is loaded (make gputest-kmod)
    python bench/isolation.py --vm               in the virtual machine of the module's lanes: plane kmod
    python bench/isolation.py --only raw,race    some families of those below (_FAMILIES)
    python bench/isolation.py --group --only cuda,raw,race    on plane seccomp, each attacker in a share group with MPS
    python bench/isolation.py --profiling        on plane seccomp, each attacker in a pod that may profile
    python bench/isolation.py --only moments     daemon, guardian, launcher: failing at 42 random moments

Prints a table of path and plane, and merges it into docs/results/isolation.json. attacks/judge.py and
attacks/failures.py explain each figure at the top; attacks/cases.py lists the attacks. The exit code is 1 if any attack
got through.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from attacks import build, world
from attacks.cases import CASES, Case
from attacks.failures import moments, safe
from attacks.judge import Row, Watch, alone, judge, plain_pause_ms, undisturbed
from attacks.resize import RESIZED, resized
from attacks.world import NEIGHBOUR, Attacker, World, end_attacker, end_pod, policy, start_attacker
from harness import ROOT, BenchError, tail

from qgpu.errors import QgpuError

_CORES = 50
_FAMILIES = ("nothing", "cuda", "raw", "race", "control", "profile", "fault", "door", "safe")
#: Families whose attacks do not depend on the kind of attacker.
_OF_PODS = ("nothing", "safe")
#: How many measurements after an attack come for each one after no attack.
_NULLS = 30
#: How many random moments are tried one by one, and how many with several processes killed at once.
_MOMENTS, _AT_ONCE = 27, 5


def run(
    place: World, families: Iterable[str], paths: Sequence[str], rows: list[Row], say: Callable[[str], None]
) -> None:
    """Try the cases of some families in one place beside one neighbour, and add a row for each."""
    bench = place.bench
    build.build(bench.directory)
    plain_ms = _plain_pauses(place, paths, say) if "fault" in families and place.plane == "seccomp" else {}
    with bench.daemon():
        policy(bench, "burst-share", 100)
        place.start_neighbour(_CORES)
        with Watch(place) as watch:
            time.sleep(1)
            rate = alone(watch, 2)
            say(f"plane {place.plane}: the neighbour alone makes {rate:.0f} steps a second")
            for family in families:
                for case in [case for case in CASES if case.family == family and place.plane in case.planes]:
                    if _wanted(case.path, paths) and (bench.directory / case.program).exists():
                        rows.append(_tried(place, watch, case, rate, plain_ms.get(case.path)))
                        say(_line(rows[-1]))
                if family == "nothing":
                    rows.append(undisturbed(watch, rate, _NULLS))
                    say(_line(rows[-1]))
                if family == "raw" and _wanted(RESIZED, paths):
                    rows.append(resized(place))
                    say(_line(rows[-1]))
                if family == "door":
                    rows.append(_forbidden_requests(place))
                    say(_line(rows[-1]))
                if family == "safe":
                    safe(place, watch, rate, rows, say)
                if family == "moments":
                    rows += moments(place, watch, rate, _MOMENTS, _AT_ONCE, say)
        end_pod(bench, NEIGHBOUR, None)


def _wanted(path: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in path for part in parts)


def _plain_pauses(place: World, paths: Sequence[str], say: Callable[[str], None]) -> dict[str, float]:
    """Measure how long a neighbour pauses beside each kernel that faults, on a card without qgpu."""
    cases = [case for case in CASES if case.kernel_faults and _wanted(case.path, paths)]
    place.start_neighbour(None)
    try:
        with Watch(place) as watch:
            time.sleep(1)
            pauses = {case.path: plain_pause_ms(place, watch, case) for case in cases}
    finally:
        place.end_neighbour()
    say(f"without qgpu the neighbour pauses {', '.join(f'{ms:g} ms ({path})' for path, ms in pauses.items())}")
    return pauses


def _tried(place: World, watch: Watch, case: Case, rate: float, plain_ms: float | None) -> Row:
    try:
        return judge(place, watch, case, rate, _CORES / 100, plain_ms)
    except BenchError as error:
        if not place.neighbour_lives():
            raise
        return Row(case.family, case.path, said=f"not judged: {error}", passed=False)


def _forbidden_requests(place: World) -> Row:
    """Try from inside a pod what only processes outside may do. All must be refused, and no grant may change."""
    bench, report = place.bench, place.bench.directory / "forbidden_requests.json"
    log = bench.directory / "forbidden_requests.log"
    before = [each["grants"] for each in bench.pods() if each["name"] == "neighbour"]
    program = Path(__file__).parent / "attacks" / "forbidden_requests.py"
    command = [sys.executable, str(program), str(report), str(bench.runtime_dir)]
    process = start_attacker(place, "attacker", ["--cores", "10"], command, log)
    process.wait(60 * bench.timeout_factor)
    end_attacker(place, "attacker", process)
    if not report.exists():
        return Row("door", "the daemon's doors", said=f"no report: {tail(log)}", passed=False)
    after = [each["grants"] for each in bench.pods() if each["name"] == "neighbour"]
    found = json.loads(report.read_text())
    said = f"opened: {', '.join(found['opened']) or 'none'}; shut: {len(found['shut'])}"
    return Row(
        "door", "the daemon's doors, as the host's root", said=said, passed=not found["opened"] and before == after
    )


def _line(row: Row) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    figures = (row.bytes_over_quota, row.neighbour_steps_lost, row.safe_default_s, row.neighbour_share)
    verdict = "ok" if row.passed else "NO"
    peak = f"; at its peak {row.peak_over_quota} over" if row.peak_over_quota else ""
    return (
        f"{verdict} {row.family:8}{row.path:42}"
        + "".join(f"{shown(each):>12}" for each in figures)
        + (f"   {row.said[: 600 if row.family == 'nothing' else 110]}{peak}")
    )


def _short(rows: Iterable[Row], *, nothing: bool = False) -> str:
    """Return how many windows were short of the full rate, out of how many; after no attack, or after an attack."""
    some = [row for row in rows if row.after_over_before is not None and (row.family == "nothing") is nothing]
    return f"{sum(row.windows_short for row in some)} of {sum(row.tries for row in some)}"


def _merge(out: Path, plane: str, about: dict[str, str], rows: list[dict[str, object]]) -> None:
    """Replace older rows of the same path by a run's rows; keep rows of cases that it did not try."""
    found = json.loads(out.read_text()) if out.exists() else {}
    kept = {(row["family"], row["path"]): row for row in (*found.get(plane, {}).get("rows", ()), *rows)}
    found[plane] = about | {"rows": [row for row in kept.values() if row["family"] != "run"]}
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _in_vm(options: argparse.Namespace) -> int:
    """Run this command in the VM, with modules built from this tree, and return its results."""
    inside = ["bench/isolation.py", "--only", options.only, "--out", "/run/share/figures.json"]
    inside += [word for path in options.path for word in ("--path", path)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "figures.json"
        lane = [str(ROOT / "tests" / "vm" / "lane.py"), "--timeout", "1800", "--results", str(results)]
        code = subprocess.run([sys.executable, *lane, "--script", *inside], check=False).returncode
        for plane, found in (json.loads(results.read_text()) if results.exists() else {}).items():
            rows = found.pop("rows")
            _merge(options.out, plane, found, rows)
    return code


def main() -> int:
    """Try what was asked for, print the table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plane", default="seccomp", choices=["seccomp", "kmod"], help="on a GPU host")
    parser.add_argument("--vm", action="store_true", help="in the virtual machine, on plane kmod")
    parser.add_argument("--only", default="", help="families, by comma")
    attackers = parser.add_mutually_exclusive_group()
    attackers.add_argument(
        "--group", action="store_true", help="attackers are members of a share group with their grant"
    )
    attackers.add_argument("--profiling", action="store_true", help="attackers are in pods that may profile")
    parser.add_argument("--path", action="append", default=[], help="only what has this in its name, or another such")
    parser.add_argument("--built", type=Path, help="a folder of attackers that cannot be built here (raw-musl)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "isolation.json")
    options = parser.parse_args()
    attacker = Attacker.MEMBER if options.group else Attacker.PROFILER if options.profiling else Attacker.POD
    if attacker is not Attacker.POD and (options.vm or options.plane != "seccomp"):
        parser.error("--group and --profiling need plane seccomp")
    usual = [each for each in _FAMILIES if attacker is not Attacker.PROFILER or each not in _OF_PODS]
    families = options.only.split(",") if options.only else usual
    if unknown := set(families) - {*_FAMILIES, "moments"}:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(_FAMILIES)}")
    if options.vm:
        return _in_vm(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    place = world.here(options.plane, attacker)
    where = place.plane + place.attacker.value
    for program in options.built.iterdir() if options.built else ():
        shutil.copy(program, place.bench.directory)
    rows: list[Row] = []
    chosen = [f"--only {options.only}"] if options.only else []
    chosen += [f'--path "{path}"' for path in options.path]
    chosen += ["--group"] * options.group + ["--profiling"] * options.profiling
    how = ["--vm"] if place.driver == "simulated" else ["--plane", place.plane][: 2 * (place.plane != "seccomp")]
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": os.uname().release,
        "driver": place.driver,
        "command": " ".join(["python bench/isolation.py", *how, *chosen]),
    }

    def say(line: str) -> None:
        print(line, flush=True)
        _merge(options.out, where, about, list(map(asdict, rows)))  # now: the caller may stop at a time limit

    say("   " + f"{'family':8}{'path':42}{'bytes over':>12}{'steps lost':>12}{'safe, s':>12}{'share':>12}")
    try:
        run(place, families, options.path, rows, say)
    except (BenchError, QgpuError) as error:
        rows.append(Row("run", "all of it", said=f"ended early: {error}", passed=False))
        say(f"{_line(rows[-1])}\n{tail(place.bench.daemon_log, 40)}")
    finally:
        place.bench.close()
    failed = [row.path for row in rows if not row.passed]
    say(f"short of the full rate: {_short(rows, nothing=True)} windows after nothing, {_short(rows)} after attacks")
    say(f"{len(rows)} tried, {len(failed)} got through or were not judged: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
