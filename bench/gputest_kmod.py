"""Test the kernel module on a GPU host in one command: build, load, test, unload, and pack the results.

    make gputest-kmod                                      # as root on a host with an NVIDIA GPU; about half an hour
    python bench/gputest_kmod.py --only contract,attacks   # some stages of contract, attacks, moments, suite
    python bench/gputest_kmod.py --key KEY --cert CERT     # sign with this key
    python bench/gputest_kmod.py --simulated               # a rehearsal, in the VM of the module's lanes

The module is unloaded and its gates are open at the end, also if a stage fails or this program is killed
(module_host.py). The archive has a summary, the results, every log, the kernel's log and all versions. Exit codes: 0 if
everything held, 1 if something did not; 3, 4 and 9 (docs/exit-codes.md) if the module cannot run on this host, in one
line, with nothing changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import module_host
from harness import ROOT

import qgpu
from qgpu.errors import QgpuError

#: Signs of a fault in the kernel's log; the log must have none after the module is loaded.
_FAULTS = ("BUG:", "WARNING:", "KASAN:", "UBSAN:", "Oops", "general protection", "blocked for more than", "soft lockup")
#: How long a program may take alone on the card.
_ALONE_S = 120
#: The version that the simulated driver reports.
SIMULATED = Path("/sys/module/nvidia/parameters/version")
#: The stages that a rehearsal cannot run, and why.
NOT_SIMULATED = {"suite": "the simulated driver runs no CUDA program"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A command that exits with 0 if all tests passed. Its log is NAME.log; it writes its results into the folder."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    #: The last line of output that matches this is the stage's summary; a stage without one fails.
    says: str = r"\S"
    #: The stage fails if its summary contains this: skipped tests prove nothing.
    nor: str = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A stage's result: whether it held (None: it did not run), how long it took in seconds, and its last line."""

    stage: str
    held: bool | None
    seconds: float
    said: str


def stages(folder: Path, *, simulated: bool) -> tuple[Stage, ...]:
    """Return all stages, in order; results go into the folder."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract")
    attack = (sys.executable, "bench/isolation.py", "--plane", "kmod", "--out", str(folder / "isolation.json"))
    suite = ("bench/suite.py", "--plane", "kmod", "--only", "b,c", "--out", str(folder), "--name", "kmod-bench")
    # Suspending pods needs libcuda, which the simulated driver lacks.
    simulations = ("-m", "vm", "--ignore", "tests/contract/test_suspension.py")
    which = simulations if simulated else ("-m", "gpu", "-k", "kmod_gpu")
    return (
        Stage("contract", (*pytest, *which), 1200, r"\d+ (passed|failed|error|skipped)"),
        Stage("attacks", attack, 2400, r"^\d+ tried"),
        Stage("moments", (*attack, "--only", "moments"), 1200, r"^\d+ tried"),
        Stage("suite", (sys.executable, *suite), 1800, r"^-- "),
    )


def tried(stage: Stage, folder: Path, module: module_host.Loaded, environment: Mapping[str, str]) -> Outcome:
    """Run a stage to its end or its time limit."""
    began = time.monotonic()
    log = folder / f"{stage.name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            stage.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        module.end_with(process.pid)
        try:
            code: int | None = process.wait(stage.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if re.search(stage.says, line)]
    said = lines[-1] if lines else "said nothing"
    holds = code == 0 and bool(lines) and stage.nor not in said
    if code is None:
        said = f"not done after {stage.limit_s:.0f} s; {said}"
    return Outcome(stage.name, holds, round(time.monotonic() - began), said)


def card_works(*, simulated: bool) -> Outcome:
    """Check after the unloading that no gate is closed: a program outside of pods gets the card."""
    began = time.monotonic()
    command = [sys.executable, "-m", "qgpu.load.main", "--kernel", "1ms", "--duration", "1s"]
    if simulated:
        command = [sys.executable, str(ROOT / "tests/vm/guest/alone.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=_ALONE_S)
        works, lines = done.returncode == 0, done.stderr.strip().splitlines() or ["no word why"]
    except subprocess.TimeoutExpired:
        works, lines = False, [f"nothing ran within {_ALONE_S} s"]
    said = "a program gets the card" if works else lines[-1]
    return Outcome("afterwards", works, round(time.monotonic() - began), said)


def module_gone(ended: Path) -> Outcome:
    """Read the result of the process that unloaded the module."""
    found = json.loads(ended.read_text()) if ended.exists() else {"unloaded": False, "seconds": 0, "trouble": "unknown"}
    said = f"in {found['seconds']} s" if found["unloaded"] else f"the module is still loaded: {found['trouble']}"
    return Outcome("unloaded", found["unloaded"], round(found["seconds"]), said)


def kernel_log(since: str) -> tuple[list[str], Outcome]:
    """Return the kernel's log from a mark on, and whether it has a fault."""
    lines = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout.splitlines()
    marks = [i for i, line in enumerate(lines) if since in line]
    lines = lines[marks[-1] :] if marks else lines
    faults = [line for line in lines if any(fault in line for fault in _FAULTS)]
    xids = sum("NVRM: Xid" in line for line in lines)
    said = faults[0] if faults else f"no fault; {xids} Xids, which some attacks provoke"
    return lines, Outcome("kernel log", not faults, 0, said)


def versions(host: module_host.Host, modules: Sequence[Path]) -> dict[str, Any]:
    """Return what was tested, and on which host."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
        except OSError:
            return ""

    query = ("nvidia-smi", "--query-gpu=name,uuid,driver_version,vbios_version,memory.total", "--format=csv,noheader")
    users = ("nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader")
    return {
        "qgpu": qgpu.__version__,
        "commit": said("git", "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": asdict(host),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "cpus": os.cpu_count(),
        "kernel": " ".join(platform.uname()),
        "cards": said(*query).splitlines(),
        "already on the cards": said(*users).splitlines(),
        "modules": {path.name: said("modinfo", "-F", "srcversion", str(path)) for path in modules},
        "driver's licence": said("modinfo", "-F", "license", "nvidia"),
        "compiler": said("gcc", "--version").partition("\n")[0],
        "python": platform.python_version(),
    }


def summary(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the summary page."""
    verdict = {True: "held", False: "**did not hold**", None: "left out"}
    rows = [f"| {o.stage} | {verdict[o.held]} | {o.seconds:.0f} | {o.said.replace('|', '/')} |" for o in outcomes]
    host, whole = about["host"], "all held" if held(outcomes) else "NOT all held"
    cards = ", ".join(about["cards"]) or "no card listed"
    return "\n".join(
        [
            f"# qgpu.ko on {host['kernel']}, driver {host['driver']}: {whole}",
            "",
            f"{about['date']}, qgpu {about['qgpu']} ({about['commit']}), {cards}.",
            f"Secure Boot is {host['secure_boot']}; the module is {about['signed']}.",
            "",
            "| stage | verdict | s | said |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def held(outcomes: Sequence[Outcome]) -> bool:
    """Tell whether no stage failed."""
    return all(outcome.held is not False for outcome in outcomes)


class Run:
    """One run, step by step; its results so far can be packed at any time."""

    def __init__(self, options: argparse.Namespace, host: module_host.Host, folder: Path) -> None:
        self._options = options
        self._host = host
        self._folder = folder
        self.outcomes: list[Outcome] = []
        self.about = versions(host, ()) | {"signed": "not built"}

    def add(self, outcome: Outcome) -> None:
        """Store an outcome, and print it."""
        self.outcomes.append(outcome)
        word = {True: "held", False: "DID NOT HOLD", None: "left out"}[outcome.held]
        print(f"{outcome.stage}: {word} after {outcome.seconds:.0f} s: {outcome.said}", flush=True)

    def all(self) -> None:
        """Build, load, try every stage, unload. Raises QgpuError if the module does not build or load."""
        modules = self._built()
        mark = f"qgpu-gputest {time.time_ns()}"
        Path("/dev/kmsg").write_text(f"{mark}: loads qgpu.ko\n")
        ended = self._folder / "unloaded.json"
        try:
            options = [f"accept_driver={self._host.driver}"] if self._options.accept_driver else []
            with module_host.loaded(modules, ended, options) as module:
                self.add(Outcome("loaded", True, 0, f"enforces on driver {module.driver}"))
                for stage in stages(self._folder, simulated=self._options.simulated):
                    if stage.name in self._options.only:
                        self._stage(stage, module)
        finally:
            self.add(module_gone(ended))
            lines, faults = kernel_log(mark)
            (self._folder / "dmesg").write_text("\n".join(lines) + "\n")
            self.add(faults)
            self.add(card_works(simulated=self._options.simulated))

    def _built(self) -> list[Path]:
        began = time.monotonic()
        if self._options.built:
            modules, signed = module_host.modules_in(self._options.built), "as it was built"
        else:
            with (self._folder / "build.log").open("w") as log:
                modules = module_host.build(self._host, self._folder, log)
            signed = module_host.sign(self._host, modules)
        self.about = versions(self._host, modules) | {"signed": signed}
        self.add(Outcome("built", True, round(time.monotonic() - began), signed))
        return modules

    def _stage(self, stage: Stage, module: module_host.Loaded) -> None:
        if self._options.simulated and stage.name in NOT_SIMULATED:
            self.add(Outcome(stage.name, None, 0, NOT_SIMULATED[stage.name]))
            return
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        self.add(tried(stage, self._folder, module, environment))

    def pack(self, out: Path) -> Path:
        """Write the results into the folder, pack it without build outputs, and return the archive."""
        write = {"versions.json": self.about, "summary.json": [asdict(each) for each in self.outcomes]}
        for name, value in write.items():
            (self._folder / name).write_text(json.dumps(value, indent=1) + "\n")
        (self._folder / "summary.md").write_text(summary(self.about, self.outcomes))
        out.mkdir(parents=True, exist_ok=True)
        name = f"qgpu-gputest-kmod-{self._host.driver}-{self._host.kernel}-{time.strftime('%Y%m%d-%H%M%S')}"
        with tarfile.open(out / f"{name}.tar.gz", "w:gz") as tar:
            for path in sorted(self._folder.iterdir()):
                if path.name != "kmod":
                    tar.add(path, f"{name}/{path.name}")
        return out / f"{name}.tar.gz"


def main() -> int:
    """Refuse in one line, or run all stages and print the archive's path."""
    names = [stage.name for stage in stages(Path(), simulated=False)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(names), help="stages, by comma")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the archive goes")
    parser.add_argument("--headers", type=Path, help="the kernel's headers; default /lib/modules/RELEASE/build")
    parser.add_argument("--built", type=Path, help="a folder with the built modules; nothing is built or signed")
    parser.add_argument("--accept-driver", action="store_true", help="also a version that nobody has compared")
    parser.add_argument("--key", help="private key that signs the module")
    parser.add_argument("--cert", help="its certificate, enrolled on this machine")
    parser.add_argument("--simulated", action="store_true", help="on the simulated driver, in the module's VM")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if bool(options.key) != bool(options.cert):
        parser.error("--key and --cert go together")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    key = (options.key, options.cert) if options.key else None
    try:
        driver = SIMULATED.read_text().strip() if options.simulated else None
        host = module_host.examine(options.headers, key, build=options.built is None, driver=driver)
    except QgpuError as error:
        return _refused(error)
    with tempfile.TemporaryDirectory(prefix="qgpu-gputest-") as directory:
        run, code = Run(options, host, Path(directory)), 0
        try:
            run.all()
        except QgpuError as error:
            run.add(Outcome("module", held=False, seconds=0, said=str(error)))
            code = _refused(error)
        finally:
            archive = run.pack(options.out)
            print(f"{'all held' if held(run.outcomes) else 'NOT all held'}: {archive}", flush=True)
    return code or (0 if held(run.outcomes) else 1)


def _refused(error: QgpuError) -> int:
    print(f"gputest-kmod: {error}", file=sys.stderr)
    return int(error.code)


if __name__ == "__main__":
    sys.exit(main())
