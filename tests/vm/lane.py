"""The VM lane: build the modules for a kernel, boot it, run the suite in it, keep the figures.

    lane.py [--kernel 6.1] [--cycles N] [--results FILE [--row ROW | --add ROW]] [PYTEST ARGUMENTS...]
    lane.py [--results FILE [--row ROW]] --script SCRIPT [ARGUMENTS...]       a Python script in the suite's place

Kernels and builds are kept in $QGPU_CACHE (default ~/.cache/qgpu), nothing of them in the tree. Recorded traces are
looked for in $QGPU_TRACES (default tests/data/traces).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import added
import driver
import emulator
import kernels
import sources
import vm
from debian import CACHE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: What no line of the kernel's log may hold. What kmemleak says is asked for at the end (guest/conftest.py).
FAULTS = ("BUG:", "WARNING:", "KASAN:", "UBSAN:", "Oops", "general protection", "INFO: task", "detected stall")


def make(*arguments: str, kernel: kernels.Source) -> None:
    command = [*kernel.wrap, "make", "-s", "-j2", *kernel.variables, "CONFIG_DEBUG_INFO_BTF_MODULES=", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def build(kernel: kernels.Source) -> Path:
    """Build everything for a kernel, warnings and sparse complaints being errors; the folder of the modules.

    What was built of the same sources stands. Lanes that start together build once.
    """
    with kernels.alone(CACHE):
        return _built(kernel)


def _built(kernel: kernels.Source) -> Path:
    work = sources.folder(CACHE, ROOT, kernel.name)
    programs = [HERE / "guest" / name for name in ("hammer.c", "fuzz.c")]
    built = work / "built"
    digest = sources.digest(ROOT / "kmod", HERE / "simnv", ROOT / "bpf", *programs)
    of = f"{kernel.release} {shutil.which('clang')} {digest}"
    if built.exists() and built.read_text() == of:
        return work / "out"
    for name, source in (("simnv", HERE / "simnv"), ("simplain", HERE / "simnv"), ("kmod", ROOT / "kmod")):
        sources.mirror(source, work / name)
    for name, options in (("simnv", ()), ("simplain", ("PLAIN=1",))):
        make("-C", str(kernel.headers), f"M={work / name}", "W=1", *options, "modules", kernel=kernel)
    plain = work / "simplain" / "nvidia.ko"
    make("-C", str(work / "kmod"), f"KDIR={kernel.headers}", f"NVIDIA_KO={plain}", *kernel.check, kernel=kernel)
    if (kernel.headers / "scripts" / "checkpatch.pl").exists():  # a source tree, not a headers package
        subprocess.run(["make", "-s", "-C", str(ROOT / "kmod"), f"KDIR={kernel.headers}", "style"], check=True)
    out = work / "out"
    out.mkdir(exist_ok=True)
    for path in (*(work / "kmod").glob("*.ko"), *(work / "simnv").glob("*.ko")):
        shutil.copy(path, out)
    shutil.copy(plain, out / "nvidia-plain.ko")
    subprocess.run(["strip", "--strip-debug", *map(str, out.glob("*.ko"))], check=True)
    for source in programs:
        includes = f"-I{ROOT / 'kmod' / 'uapi'}"
        target = str(out / source.stem)
        subprocess.run(["cc", "-O2", "-static", "-Wall", includes, "-o", target, str(source)], check=True)
    bpf(out / "device_files.bpf.o")
    built.write_text(of)
    return out


def bpf(out: Path) -> None:
    """Compile the BPF program, where the host can; its tests are skipped elsewhere."""
    out.unlink(missing_ok=True)
    if shutil.which("clang") and Path("/usr/include/bpf/bpf_helpers.h").exists():
        subprocess.run([sys.executable, str(ROOT / "bpf" / "build.py"), str(out)], check=True)


def with_driver(branch: str, kernel: kernels.Source, out: Path) -> tuple[Path, str]:
    """Put the real driver of a branch in place of the simulated one; the folder of the modules, and its version."""
    nvidia, version = driver.build(branch, kernel, CACHE)
    work = sources.folder(CACHE, ROOT, f"{kernel.name}-{branch}")
    sources.mirror(HERE / "fakepci", work / "fakepci")
    sources.mirror(ROOT / "kmod", work / "kmod")
    make("-C", str(kernel.headers), f"M={work / 'fakepci'}", "W=1", "modules", kernel=kernel)
    make("-C", str(work / "kmod"), f"KDIR={kernel.headers}", f"NVIDIA_KO={nvidia}", "modules", kernel=kernel)
    real = work / "out"
    real.mkdir(exist_ok=True)
    for path in (*(work / "kmod").glob("*.ko"), work / "fakepci/fakepci.ko", *driver.both(nvidia), out / "hammer"):
        shutil.copy(path, real)
    subprocess.run(["strip", "--strip-debug", *map(str, real.glob("*.ko"))], check=True)
    return real, version


def note(path: Path, name: str, of: dict[str, str], figures: dict[str, float]) -> None:
    """Merge a run's figures into a results file, and sum up what is said of all traces and of all rules."""
    results = read(path)
    run = results.setdefault(name, {"figures": {}})
    run.pop("note", None)  # what somebody wrote of the run before
    run |= of | {"date": time.strftime("%Y-%m-%d"), "command": command()}
    run["figures"] |= figures
    for total in ("replay_unexplained_calls", "replay_leaked_objects", "rules_differing"):
        parts = [value for key, value in run["figures"].items() if key.startswith(f"{total}_")]
        run["figures"] |= {total: sum(parts)} if parts else {}
    with_uvm = {row["driver"].partition(".")[0] for row in results.values() if holds_with_uvm(row)}
    results["real drivers"] = {"driver": ", ".join(sorted(with_uvm)), "figures": {"real_uvm_drivers": len(with_uvm)}}
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def read(path: Path | None) -> dict[str, Any]:
    """Return what a results file holds."""
    return json.loads(path.read_text()) if path and path.exists() else {}


def add(path: Path, name: str, of: dict[str, str], found: dict[str, float], seeds: int) -> None:
    """Add a run's figures to a row of a results file (added.py)."""
    results = read(path)
    row = results[name] = added.row(results, name, of["sources"])
    row |= of | {"date": time.strftime("%Y-%m-%d"), "command": command()}
    row["next_seed"] += seeds
    row["figures"] = added.figures(row["figures"], {**found, "boots": 1})
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def command() -> str:
    """Return this process's command, without where its figures go."""
    script, *rest = sys.argv
    elsewhere = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--results", "--row", "--add"):
        elsewhere.add_argument(option)
    return shlex.join([f"tests/vm/{Path(script).name}", *elsewhere.parse_known_args(rest)[1]])


def holds_with_uvm(run: dict[str, Any]) -> bool:
    """Tell whether a run was of a real driver with its UVM, and all held."""
    figures = run["figures"]
    return "real_uvm_load_unload_cycles" in figures and not figures["tests_failed"] + figures["tests_error"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="6.1", choices=sorted(kernels.KERNELS))
    parser.add_argument("--driver", choices=sorted(driver.DRIVERS), help="the real driver of a branch, without a GPU")
    parser.add_argument("--cycles", type=int, default=20, help="times the module is loaded and unloaded under load")
    parser.add_argument("--single", action="store_true", help="one thread of the emulator for both CPUs")
    parser.add_argument("--count", action="store_true", help="one CPU, and the guest's clock counts its instructions")
    parser.add_argument("--fuzz", type=int, default=20000, help="random calls")
    parser.add_argument("--faults", type=int, default=60, help="runs of the test of random faults")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--results", type=Path, help="JSON file the figures go to")
    parser.add_argument("--row", help="its row, in place of the kernel's or the driver's")
    parser.add_argument("--add", metavar="ROW", help="its row, where counts of runs of the same sources add up")
    parser.add_argument("--timeout", type=float, default=900, help="seconds the guest may take")
    parser.add_argument("--script", nargs=argparse.REMAINDER, help="a script, whose figures.json goes to the results")
    arguments, pytest = parser.parse_known_args()
    kernel = kernels.get(arguments.kernel, CACHE)
    started = time.monotonic()
    out = build(kernel)
    suite, version = [str(HERE / "guest"), str(ROOT / "tests" / "contract")], ""
    if arguments.driver:
        suite = [str(HERE / "real")]
        out, version = with_driver(arguments.driver, kernel, out)
    print(f"built for {kernel.name} in {time.monotonic() - started:.0f} s")
    if arguments.build_only:
        return 0
    # the suites of real drivers have probes come and go under load (emulator.py); the sanitizer's kernel, with a thread
    # for each CPU of QEMU 10, at times loses its first process before it runs us
    single = arguments.single or arguments.count or bool(arguments.driver) or arguments.kernel == "sanitizer"
    digest = sources.digest(ROOT / "kmod", HERE / "simnv")
    environment = {
        "QGPU_CACHE": str(CACHE),
        "QGPU_VM_SINGLE": str(int(single)),
        "QGPU_VM_COUNTED": str(int(arguments.count)),
        "QGPU_VM_BUILD": str(out),
        "QGPU_VM_REAL": version,
        "QGPU_VM_CARD": hex(driver.CARD_AT),
        "QGPU_VM_HEADERS": str(kernel.headers),
        "QGPU_GPUTEST_ONLY": os.environ.get("QGPU_GPUTEST_ONLY", ""),
        "QGPU_VM_CYCLES": str(arguments.cycles),
        "QGPU_VM_FUZZ": str(arguments.fuzz),
        "QGPU_VM_FAULTS": str(arguments.faults),
        "QGPU_VM_SEED": str(added.row(read(arguments.results), arguments.add, digest)["next_seed"]),
        "QGPU_VM_FAULTS_S": str(arguments.timeout * 0.5),
        "QGPU_TRACES": os.environ.get("QGPU_TRACES", str(ROOT / "tests" / "data" / "traces")),
        "PYTHONPATH": str(ROOT),
    }
    environment |= {name: os.environ[name] for name in ("QGPU_SLURM",) if name in os.environ}
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "vm", *(pytest or suite)]
    if arguments.script:
        run = [sys.executable, *arguments.script]
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as share:
        outcome = vm.boot(
            kernel.boot(),
            run,
            share=Path(share),
            cwd=ROOT,
            environment=environment,
            timeout_s=arguments.timeout,
            append=f"{kernel.append} {driver.APPEND}" if arguments.driver else kernel.append,
            single=single,
            counted=arguments.count,
            qemu=["qemu-system-x86_64"] if single and not arguments.single else emulator.get(CACHE),
        )
        figures = Path(share) / "figures.json"
        found = json.loads(figures.read_text()) if figures.exists() else {}
    print(outcome.output)
    faults = [line for line in outcome.dmesg.splitlines() if any(fault in line for fault in FAULTS)]
    print("\n".join(outcome.dmesg.splitlines()[-400:]) if outcome.status is None or faults else "")
    print(outcome.stuck)
    print(f"kernel {kernel.name}: status {outcome.status}, {len(faults)} faults, {outcome.seconds:.0f} s in the VM")
    if arguments.script and (outcome.status != 0 or not arguments.row):
        if arguments.results and found and not arguments.row:
            arguments.results.write_text(json.dumps(found))
        return 0 if outcome.status == 0 and not faults else 1
    seeds = found.pop("seeds", 0)
    if not arguments.script:
        found |= dict.fromkeys(("tests_passed", "tests_failed", "tests_error"), 0)
        said = re.findall(r"(\d+) (passed|failed|error)", outcome.output)
        found |= {f"tests_{what}": int(number) for number, what in said}
    found |= {"kernel_faults": len(faults), "vm_seconds": round(outcome.seconds)}
    of = {"kernel": kernel.release, "driver": version or "simulated", "sources": digest}
    if arguments.results and arguments.add:
        add(arguments.results, arguments.add, of, found, seeds)
    elif arguments.results:
        name = f"{arguments.kernel} nvidia {version}" if version else arguments.kernel
        note(arguments.results, arguments.row or name, of, found)
    return 0 if outcome.status == 0 and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
