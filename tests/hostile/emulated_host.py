"""The seccomp plane as a service, for real: daemon, guardian, pods under ``qgpuctl run``; the driver alone is emulated.

Everything runs in a mount namespace of its own with a cgroup2 tree, which not every host shows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.planes.seccomp.guardian_link import GuardianLink
from tests.cli.manager import Manager
from tests.cli.programs import TIMEOUT_S, environment
from tests.hostile import emulated
from tests.hostile.attacker import ATTACKS

#: After this long, what a guardian asks about is asked.
_SETTLED_S = 1.5

_ROOT = Path(__file__).parents[2]


class EmulatedHost:
    """A daemon under a service manager, and pods that allocate and free all the time."""

    def __init__(self, directory: Path, pods: int, *, divided: bool = False) -> None:
        """Take ``divided`` for a card in MIG mode, whose instances are shared."""
        self.directory = directory
        self.pause = directory / "pause"
        tree = directory / "cgroup"
        tree.mkdir()
        self._tree = tree
        self._room = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"mount -t cgroup2 none {tree} && echo there && exec cat"],
            stdin=subprocess.PIPE,  # it ends with us, however we do
            stdout=subprocess.PIPE,
        )
        assert self._room.stdout is not None
        self.there = self._room.stdout.readline() == b"there\n"
        if not self.there:
            return
        self._inside = ("nsenter", "-t", str(self._room.pid), "-m", "env", f"PYTHONPATH={_ROOT}")
        mine = (*self._inside[:-1], f"PYTHONPATH={_ROOT / 'tests/hostile/driver'}:{_ROOT}")
        emulator = [f"{emulated.VARIABLE}={directory / 'rm'}"]
        #: The ids of the GPU instances that NVML finds on a divided card.
        self.instances = directory / "instances"
        if divided:
            self.instances.write_text(" ".join(str(each.gpu_instance) for each in emulated.INSTANCES))
            emulator.append(f"{emulated.DIVIDED}={self.instances}")
        settings = directory / "qgpud.toml"
        more = '[gpu.0]\nmig = "share"\n' if divided else ""
        settings.write_text(f'[containers]\ncdi = "off"\n{more}')  # this host's own is not for an emulated card
        self.manager = Manager(directory, "seccomp", (*mine, *emulator), ("--config", str(settings)))
        self.runtime_dir = self.manager.runtime_dir
        self.daemon = self.manager.start()
        self.pods: dict[str, subprocess.Popen[bytes]] = {}
        self._names: set[str] = set()
        try:
            for client in emulated.CLIENTS[:pods]:
                self.start_pod(client)
        except BaseException:
            self.close()
            raise

    def start_pod(self, client: int, inside: str = "/", pgpu: int = 0) -> None:
        """Start a pod with a limit in a cgroup, and wait until it allocates. They are this host's: so is its name."""
        name = f"host-{os.getpid()}-{client}"
        self._names.add(name)
        program = [sys.executable, "-m", "tests.hostile.allocator", str(client), str(self.steps(name)), str(self.pause)]
        with self.said(name).open("w") as said:
            self.pods[name] = subprocess.Popen(
                [
                    *self._inside,
                    *_in_cgroup(self._tree / inside.lstrip("/")),
                    *self._ctl("run", "--gpu", str(pgpu), "--name", name, "--memory", "1GiB", "--", *program),
                ],
                env=environment(),
                stdout=said,
                stderr=said,
            )
        self.until(lambda: self.steps(name).exists() and len(self.times(name)) > 3, f"{name} runs")

    def cgroup(self, path: str) -> Path:
        """Return where this process finds a cgroup."""
        return Path(f"/proc/{self._room.pid}/root{self._tree}{path}")

    def start_attacker(self, attack: str) -> subprocess.Popen[bytes]:
        """Start a pod with a limit that attacks, with a client of the attack's own; return its launcher."""
        client = emulated.ATTACKERS[[*ATTACKS].index(attack)]
        name = f"host-{os.getpid()}-{attack}"
        self._names.add(name)
        program = [sys.executable, "-m", "tests.hostile.attacker", attack, str(client), str(self.pause)]
        with self.said(name).open("w") as said:
            return subprocess.Popen(
                [*self._inside, *self._ctl("run", "--name", name, "--memory", "1GiB", "--", *program)],
                env=environment(),
                stdout=said,
                stderr=said,
            )

    def has_attacked(self, attack: str) -> bool:
        """Tell whether an attacker has done its worst."""
        return "done" in self.said(f"host-{os.getpid()}-{attack}").read_text()

    def _ctl(self, *arguments: str) -> list[str]:
        patient = ["--runtime-dir", str(self.runtime_dir), "--timeout", str(TIMEOUT_S)]
        return [sys.executable, "-m", "qgpu.cli.main", *patient, *arguments]

    def steps(self, name: str) -> Path:
        return self.directory / f"{name}.steps"

    def said(self, name: str) -> Path:
        return self.directory / f"{name}.said"

    def times(self, name: str) -> list[float]:
        """Return when a pod was done with its rounds."""
        lines = self.steps(name).read_text().split("\n")[:-1]
        return [float(line) for line in lines if line != "rests"]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something while every pod lives."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            for name, pod in self.pods.items():
                assert pod.poll() is None, f"{name} has ended: {self.said(name).read_text()[-500:]}"
            assert time.monotonic() < deadline, f"not so: {what}"
            self.manager.listen()
            time.sleep(0.005)

    def go_on(self) -> float:
        """Wait until every pod is done with two more rounds; return the longest wait for the first, in seconds."""
        now = time.monotonic()
        self.until(lambda: all(sum(at > now for at in self.times(name)) >= 2 for name in self.pods), "pods go on")
        return max(min(at for at in self.times(name) if at > now) - now for name in self.pods)

    def longest_wait(self, since: float) -> float:
        """Return the longest time that a pod took for a round since then, in seconds."""
        times = ([since, *(at for at in self.times(name) if at > since)] for name in self.pods)
        return max(after - before for each in times for before, after in pairwise(each))

    def guardian(self) -> int:
        """Return the guardian's process, when there is one."""
        found: list[int] = []

        def look() -> bool:
            with suppress(Exception):
                link = GuardianLink(self.runtime_dir / "guardian.sock")
                link.close()
                found.append(int(link.hello["pid"]))
            return bool(found)

        self.until(look, "there is a guardian")
        return found[0]

    def standby(self) -> int:
        """Return the process that is to be the next guardian."""
        found: list[int] = []

        def look() -> bool:
            for process in psutil.Process(self.daemon.pid).children():
                with suppress(psutil.Error):
                    if process.name() == "qgpu-standby":
                        found.append(process.pid)
            return bool(found)

        self.until(look, "there is one in reserve")
        return found[0]

    def freeze(self, pid: int) -> None:
        """Let a process hang without being stopped: nothing of it runs, and nothing says so."""
        self._ice.mkdir(exist_ok=True)
        (self._ice / "cgroup.procs").write_text(str(pid))
        (self._ice / "cgroup.freeze").write_text("1")

    def thaw(self) -> None:
        """Let what is frozen go on."""
        if self._ice.exists():
            (self._ice / "cgroup.freeze").write_text("0")

    @property
    def _ice(self) -> Path:
        return self.cgroup(f"/qgpu-hangs-{os.getpid()}")

    def restart(self) -> None:
        """Let the service manager start the daemon again, once it has ended."""
        self.daemon.wait(TIMEOUT_S)
        self.daemon = self.manager.start()

    def forget(self) -> None:
        """Let the service manager lose what it kept."""
        self.manager.forget()

    def rest(self) -> dict[str, int]:
        """Let the pods rest with nothing made; return what could have piled up."""
        before = {name: self.steps(name).read_text().count("rests") for name in self.pods}
        self.pause.touch()
        try:
            self.until(
                lambda: all(self.steps(name).read_text().count("rests") > n for name, n in before.items()), "pods rest"
            )
            self.standby()
            time.sleep(_SETTLED_S)
            rm = emulated.Rm(self.directory / "rm", ObjectTable())
            rm.load()
            processes = [psutil.Process(pid) for pid in (self.daemon.pid, self.guardian())]
            looks = []
            for _ in range(5):  # one that asks is connected for a moment
                time.sleep(0.05)
                looks.append(sum(process.num_fds() for process in processes))
            return {
                "descriptors": min(looks),
                "guardians": sum(self._is_guardian(process) for process in psutil.process_iter()),
                "charged": sum(pod["usage"][0]["memory"] for pod in self.listed()),
                "objects of RM": len(rm.objects),
                "bytes of RM": rm.held,
            }
        finally:
            self.pause.unlink()

    def _is_guardian(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return "qgpu.guardian" in process.cmdline() and str(self.runtime_dir) in process.cmdline()
        return False

    def listed(self) -> list[dict]:
        """Return what the daemon tells of pods."""
        return list(self.told("pod", "list")["pods"])

    def told(self, *arguments: str) -> dict[str, Any]:
        """Return what qgpuctl tells as JSON."""
        command = [*self._inside, *self._ctl(*arguments, "-o", "json")]
        ran = subprocess.run(command, check=True, capture_output=True, env=environment(), timeout=TIMEOUT_S)
        return dict(json.loads(ran.stdout))

    def close(self) -> None:
        """End everything."""
        if self.there:
            self.thaw()
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    words = process.cmdline()
                    if {"tests.hostile.allocator", "tests.hostile.attacker"} & {*words} and str(self.pause) in words:
                        process.kill()
            for pod in self.pods.values():
                pod.send_signal(signal.SIGCONT)
                pod.wait(TIMEOUT_S)
            for pid in (self.daemon.pid, *self._guardians()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.daemon.wait(TIMEOUT_S)
            self.manager.close()
            for group in (self._ice, *(self._ice.parent / "qgpu" / name for name in self._names)):
                with suppress(OSError):
                    group.rmdir()
        self._room.kill()
        self._room.wait()

    def _guardians(self) -> list[int]:
        return [process.pid for process in psutil.process_iter() if self._is_guardian(process)]


def _in_cgroup(directory: Path) -> list[str]:
    """Return the beginning of a command that runs the rest in a cgroup."""
    return ["sh", "-c", f'echo $$ > {directory}/cgroup.procs && exec "$@"', "sh"]
