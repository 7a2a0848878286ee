"""Mutation testing of the module: every mutation of mutations.py is built and tested; those that survive are told.

    mutants.py [--only TEXT] [--results FILE] [--timeout S]

Those whose outcome the results file holds, for the same sources and the same test, are not run again. The others are
built first. Then one guest runs their tests one after another, each of them on the module as it is before: on a host
that is too busy it fails there as well, and proves nothing. Where a mutation hangs the guest, or the guest
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
from dataclasses import replace
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


def control(mutation: Mutation) -> Mutation:
    """Return no mutation, under the same test: on a host that is too busy it would seem to be killed as well."""
    return replace(mutation, file="", old="", new="", breaks="")


def sure(found: Mapping[str, str], todo: Mapping[str, Mutation], digest: str) -> dict[str, str]:
    """Return the outcomes that count: of what is killed, that whose test passes without it, on this host today."""
    return {
        name: outcome
        for name, outcome in found.items()
        if todo[name].file
        and outcome != UNBUILT
        and (outcome == SURVIVED or found.get(mark(control(todo[name]), digest)) == SURVIVED)
    }


def row(outcomes: Mapping[str, str], mutations: Sequence[Mutation], digest: str) -> dict[str, Any]:
    """Return what the results file holds of these mutations of these sources, of which some have an outcome."""
    has = {name: (m, outcomes[name]) for m in mutations if (name := mark(m, digest)) in outcomes}
    survived = [f"{m.file}: {m.breaks}" for m, outcome in has.values() if outcome == SURVIVED]
    return {
        "outcomes": {name: outcome for name, (_, outcome) in has.items()},
        "survived": survived,
        "figures": {
            "mutants": len(mutations),
            "mutants_run": len(has),
            "mutants_killed": len(has) - len(survived),
            "mutants_survived": len(survived),
        },
    }


def build(
    chosen: Sequence[Mutation], kernel: kernels.Source, digest: str
) -> tuple[dict[Mutation, Path], list[Mutation]]:
    """Build the module with each mutation where that is not done; where each is, and what does not build."""
    plain = lane.build(kernel)
    work = sources.folder(CACHE, lane.ROOT, f"{kernel.name}-mutants")
    kmod, folders, unbuilt = work / "kmod", {}, []
    for mutation in chosen:
        of = f"{digest} {mutation.file} {mutation.old} {mutation.new}"
        out = folders[mutation] = work / hashlib.sha256(of.encode()).hexdigest()[:12]
        if (out / "built").exists():
            continue
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(plain, out)
        if mutation.file and not mutated(mutation, kmod, out, kernel):
            unbuilt.append(mutation)
            continue
        (out / "built").touch()
    return folders, unbuilt


def mutated(mutation: Mutation, kmod: Path, out: Path, kernel: kernels.Source) -> bool:
    """Build the module with a mutation in ``kmod``, and put it in ``out``; tell whether it builds."""
    changed = mutation.applied().encode()
    sources.mirror(lane.ROOT / "kmod", kmod, lambda name, data: changed if name == mutation.file else data)
    try:
        lane.make("-C", str(kmod), f"KDIR={kernel.headers}", "modules", kernel=kernel)
    except subprocess.CalledProcessError:
        return False
    shutil.copy(kmod / "qgpu.ko", out)
    subprocess.run(["strip", "--strip-debug", str(out / "qgpu.ko")], check=True)
    return True


def run(
    todo: Mapping[str, Mutation], folders: Mapping[Mutation, Path], kernel: kernels.Source, timeout_s: float
) -> dict[str, str]:
    """Test these in one guest, by their marks; what became of those that it got to."""
    tests = [
        {"name": name, "built": str(folders[m]), "test": str(lane.HERE / "guest" / m.test), "only": m.only}
        for name, m in todo.items()
    ]
    environment = {
        "QGPU_VM_BUILD": str(lane.HERE),
        "QGPU_VM_FAULTS": "60",
        "PYTHONPATH": str(lane.ROOT),
        "QGPU_TRACES": str(lane.ROOT / "tests" / "data" / "traces"),
    }
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as folder:
        share = Path(folder)
        (share / "todo").write_text(json.dumps(tests))
        outcome = vm.boot(
            kernel.boot(),
            [sys.executable, str(lane.HERE / "mutants_guest.py"), "/run/share/todo"],
            share=share,
            cwd=lane.ROOT,
            environment=environment,
            timeout_s=timeout_s,
            qemu=emulator.get(CACHE),
        )
        if not (share / "running").exists():
            raise RuntimeError(f"no test ran: {outcome.output[-2000:]}{outcome.stuck}\n{outcome.dmesg[-2000:]}")
        last = (share / "running").read_text() or next(iter(todo))
        found = {}
        for name, mutation in todo.items():
            if (log := share / f"log.{name}").exists():
                shutil.copy(log, folders[mutation] / f"log.{name}")  # why it was killed
            if (ended := share / f"ended.{name}").exists() and (status := ended.read_text().strip()):
                said = share / f"dmesg.{name}"
                fault = said.exists() and any(each in said.read_text(errors="replace") for each in lane.FAULTS)
                found[name] = KILLED if fault else _OUTCOMES.get(int(status), f"pytest ended with {status}")
    return found if last in found or outcome.seconds >= timeout_s else found | {last: HUNG}


def keep(path: Path, release: str, digest: str, found: Mapping[str, str]) -> None:
    """Add outcomes to a results file, without those of other sources."""
    results = lane.read(path)
    known = results.get("mutants", {}).get("outcomes", {}) | found
    about = {"command": lane.command(), "date": time.strftime("%Y-%m-%d"), "kernel": release, "driver": "simulated"}
    results["mutants"] = about | {"sources": digest} | row(known, MUTATIONS, digest)
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
    known = lane.read(arguments.results).get("mutants", {}).get("outcomes", {})
    chosen = [m for m in MUTATIONS if arguments.only in f"{m.file}: {m.breaks}" and mark(m, digest) not in known]
    chosen.sort(key=lambda m: (m.test, m.only))
    todo = {mark(each, digest): each for m in chosen for each in (control(m), m)}
    folders, unbuilt = build(list(todo.values()), kernel, digest)
    found = {mark(m, digest): UNBUILT for m in unbuilt}
    print(f"{len(chosen) - len(unbuilt)} of {len(chosen)} built", flush=True)
    if arguments.build_only:
        return 0
    end = time.monotonic() + arguments.timeout
    while (left := {name: m for name, m in todo.items() if name not in found}) and time.monotonic() < end:
        found |= (got := run(left, folders, kernel, end - time.monotonic()))
        counts = sure(found, todo, digest)
        if arguments.results:
            keep(arguments.results, kernel.release, digest, counts)
        for name, outcome in got.items():
            if (m := todo[name]).file:
                unsure = "" if name in counts else "not counted, its test has not passed without it: "
                print(f"{unsure}{outcome}: {m.file}: {m.breaks}", flush=True)
    figures = row(sure(found, todo, digest), chosen, digest)["figures"]
    print(figures)
    return 0 if figures["mutants_killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
