"""Mutation testing of the module: every mutation of mutations.py is built and tested; those that survive are told.

    mutants.py [--only TEXT] [--results FILE] [--timeout S]

Those whose outcome the results file holds, for the same sources and the same test, are not run again. The others are
built first. Then one guest runs their tests one after another. Where a mutation hangs the guest, or the guest
cannot get rid of the module, that mutation is killed, and another guest runs the rest. What the tests said is kept
beside each build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import emulator
import kernels
import lane
import sources
import vm
from debian import CACHE
from mutations import MUTATIONS, Mutation

#: Marks a mutation that does not compile: the list is wrong.
UNBUILT, KILLED, SURVIVED = "does not compile", "killed", "survived"
#: Killed, too; but a host that is slow enough looks like that.
HUNG = "killed: its tests did not end"

#: pytest's statuses, and that of tests that did not end (mutants_guest.py).
_OUTCOMES = {0: SURVIVED, 1: KILLED, 124: HUNG}


def mark(mutation: Mutation, digest: str) -> str:
    """Return a name for this mutation of these sources under its test, with what that test imports."""
    guest = lane.HERE / "guest"
    shared = sorted(path for path in guest.iterdir() if path.suffix in (".py", ".c") and not path.match("test_*"))
    seen = hashlib.sha256(f"{digest} {mutation}".encode())
    for path in (*shared, guest / mutation.test):
        seen.update(path.read_bytes())
    return seen.hexdigest()[:12]


def row(outcomes: Mapping[str, str], mutations: Sequence[tuple[str, Mutation]]) -> dict[str, Any]:
    """Return what the results file holds of these mutations, each with its mark, of which some have an outcome."""
    has = {each: outcomes[each] for each, _ in mutations if each in outcomes}
    return {
        "outcomes": has,
        "survived": [f"{m.file}: {m.breaks}" for each, m in mutations if has.get(each) == SURVIVED],
        "figures": {
            "mutants": len(mutations),
            "mutants_run": len(has),
            "mutants_killed": sum(each in (KILLED, HUNG) for each in has.values()),
            "mutants_hung": sum(each == HUNG for each in has.values()),
            "mutants_survived": sum(each == SURVIVED for each in has.values()),
        },
    }


def build(chosen: Sequence[tuple[int, Mutation]], kernel: kernels.Source) -> tuple[Path, dict[int, str]]:
    """Build the module with each mutation where that is not done; the folder of all, and what does not build."""
    plain = lane.build(kernel)
    digest = sources.digest(lane.ROOT / "kmod", lane.HERE / "simnv")
    work = sources.folder(CACHE, lane.ROOT, f"{kernel.name}-mutants")
    kmod, unbuilt = work / "kmod", {}
    for number, mutation in chosen:
        out = work / str(number)
        built, of = out / "built", f"{digest} {mutation.file} {mutation.old} {mutation.new}"
        if built.exists() and built.read_text() == of:
            continue
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(plain, out)
        changed = mutation.applied().encode()
        sources.mirror(
            lane.ROOT / "kmod", kmod, lambda name, data, m=mutation, c=changed: c if name == m.file else data
        )
        try:
            lane.make("-C", str(kmod), f"KDIR={kernel.headers}", "modules", kernel=kernel)
        except subprocess.CalledProcessError:
            unbuilt[number] = UNBUILT
            continue
        shutil.copy(kmod / "qgpu.ko", out)
        subprocess.run(["strip", "--strip-debug", str(out / "qgpu.ko")], check=True)
        built.write_text(of)
    return work, unbuilt


def run(numbers: Sequence[int], work: Path, kernel: kernels.Source, timeout_s: float) -> dict[int, str]:
    """Test these in one guest; what became of those that it got to."""
    guest = lane.HERE / "guest"
    todo = [
        {
            "number": number,
            "built": str(work / str(number)),
            "test": str(guest / MUTATIONS[number].test),
            "only": MUTATIONS[number].only,
        }
        for number in numbers
    ]
    environment = {
        "QGPU_VM_BUILD": str(work),
        "QGPU_VM_FAULTS": "60",
        "PYTHONPATH": str(lane.ROOT),
        "QGPU_TRACES": str(lane.ROOT / "tests" / "data" / "traces"),
    }
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as folder:
        share = Path(folder)
        (share / "todo").write_text(json.dumps(todo))
        outcome = vm.boot(
            kernel.boot(),
            [sys.executable, str(lane.HERE / "mutants_guest.py"), "/run/share/todo"],
            share=share,
            cwd=lane.ROOT,
            environment=environment,
            timeout_s=timeout_s,
            qemu=emulator.get(CACHE),
        )
        found = {}
        for number in numbers:
            ended, said = share / f"ended.{number}", share / f"dmesg.{number}"
            if (log := share / f"log.{number}").exists():
                shutil.copy(log, work / str(number) / "log")  # why it was killed
            if ended.exists() and ended.read_text().strip():
                fault = said.exists() and any(each in said.read_text(errors="replace") for each in lane.FAULTS)
                status = int(ended.read_text())
                if status not in _OUTCOMES:
                    raise RuntimeError(f"{MUTATIONS[number]}: {log.read_text()[-2000:]}")
                found[number] = KILLED if fault else _OUTCOMES[status]
        running = share / "running"
        if not running.exists():
            raise RuntimeError(f"no test ran: {outcome.output[-2000:]}{outcome.stuck}\n{outcome.dmesg[-2000:]}")
        last = int(running.read_text() or numbers[0])
        return found | ({} if last in found or outcome.seconds >= timeout_s else {last: HUNG})


def keep(path: Path, release: str, marks: Sequence[str], found: Mapping[int, str]) -> None:
    """Add outcomes to a results file, without those of other sources."""
    results = lane.read(path)
    known = results.get("mutants", {}).get("outcomes", {}) | {marks[n]: what for n, what in found.items()}
    about = {"command": lane.command(), "date": time.strftime("%Y-%m-%d"), "kernel": release, "driver": "simulated"}
    results["mutants"] = about | row(known, list(zip(marks, MUTATIONS, strict=True)))
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose file or effect contains this")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--results", type=Path, help="JSON file the figures go to")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds all guests together may take")
    arguments = parser.parse_args()
    kernel = kernels.get("6.1", CACHE)
    digest = sources.digest(lane.ROOT / "kmod", lane.HERE / "simnv")
    marks = [mark(mutation, digest) for mutation in MUTATIONS]
    known = lane.read(arguments.results).get("mutants", {}).get("outcomes", {})
    chosen = [
        (n, m) for n, m in enumerate(MUTATIONS) if arguments.only in f"{m.file}: {m.breaks}" and marks[n] not in known
    ]
    work, found = build(chosen, kernel)
    print(f"{len(chosen) - len(found)} of {len(chosen)} built", flush=True)
    if arguments.build_only:
        return 0
    end = time.monotonic() + arguments.timeout
    while (left := [n for n, _ in chosen if n not in found]) and time.monotonic() < end:
        found |= (got := run(left, work, kernel, end - time.monotonic()))
        if arguments.results:
            keep(arguments.results, kernel.release, marks, found)
        for number in sorted(got):
            print(f"{got[number]}: {MUTATIONS[number].file}: {MUTATIONS[number].breaks}", flush=True)
    for number in (n for n, _ in chosen if n not in found):
        print(f"not run: {MUTATIONS[number].file}: {MUTATIONS[number].breaks}")
    counts = {what: sum(each == what for each in found.values()) for what in (KILLED, HUNG, SURVIVED, UNBUILT)}
    print(counts)
    return 0 if counts[KILLED] + counts[HUNG] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
