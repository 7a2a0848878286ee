"""A node on plane seccomp: real qgpud, guardian and pods' filters; the driver alone is emulated (``tests/hostile``)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from qgpu.errors import QgpuError
from qgpu.guardian.proxy.seccomp_filter import install
from qgpu.nvidia import abi
from qgpu.planes.seccomp.guardian_link import GuardianLink
from qgpu.runtime import seccomp_profile
from tests.cli.manager import Manager
from tests.guardian.asked import DEVICE_PARAMS, alloc, alloc_status, device, free, memory_params, subdevice
from tests.guardian.fake_rm import PAGE
from tests.hostile import emulated
from tests.hostile.allocator import Program
from tests.k8s.container import Container
from tests.k8s.world import GI, PATIENCE_S, World
from tests.runtime import deaths

_ROOT = Path(__file__).parents[2]
_HANDLE = 0x50


class GuardedContainer(Container):
    """A container behind the pods' filter, whose process asks for memory when it is told to."""

    def __init__(self, world: GuardedWorld, pod: str, devices: list[str], name: str = "main") -> None:
        self._client = next(world.clients)
        #: There while the process has its file of the driver open.
        self._file = world.files_of_driver / str(self._client)
        self._listener = seccomp_profile.listener(world.runtime_dir)
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(PATIENCE_S)
        super().__init__(world, pod, devices, name)
        self._file.touch()
        self._theirs.close()

    def start_process(self) -> subprocess.Popen[bytes]:
        """Start what waits for its filter."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.k8s.guarded", str(self._theirs.fileno()), str(self._client)],
            pass_fds=[self._theirs.fileno()],
            cwd=_ROOT,
        )

    def linux(self) -> dict[str, object]:
        """With the profile that nodes on this plane have."""
        return super().linux() | {"seccomp": seccomp_profile.profile(seccomp_profile.UNCONFINED, self._listener)}

    def bind(self, may_be_refused: bool = False) -> str:
        """Run the hooks; then hand over the listener, as a runtime does after them."""
        if why := super().bind(may_be_refused):
            return why
        self._ours.send(b"enter\n")
        _, (listener,), _, _ = socket.recv_fds(self._ours, 64, 1)
        state = {"fds": ["seccompFd"], "pid": self.process.pid, "state": {"id": self.id}}
        try:
            with socket.socket(socket.AF_UNIX) as agent:
                agent.connect(str(self._listener))
                socket.send_fds(agent, [json.dumps(state).encode()], [listener])
        except OSError as error:
            return str(error)
        finally:
            os.close(listener)
        return ""

    def lacks(self) -> str:
        """Ask for some memory."""
        return self._asks(PAGE, abi.NV_OK)

    def exceeds(self, memory: int) -> str:
        """Ask for some memory, and for more than its claim holds."""
        return self.lacks() or self._asks(memory + PAGE, abi.NV_ERR_NO_MEMORY)

    def _asks(self, size: int, expected: int) -> str:
        """Ask for memory; say how the answer differs from what is expected, "" if it does not."""
        self._ours.send(f"{size}\n".encode())
        status = int(self._ours.recv(64) or -1)
        return "" if status == expected else f"{size} bytes: {status:#x} and not {expected:#x}"

    def kill(self) -> None:
        """End it, which closes its file."""
        super().kill()
        self._file.unlink()
        self._ours.close()


class GuardedWorld(World):
    """A node with one card; a guardian that is killed has a successor in reserve."""

    cards, memory = 1, emulated.MEMORY - GI // 2

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        driver = f"PYTHONPATH={_ROOT / 'tests/hostile/driver'}:{_ROOT}"
        #: Where deaths are ordered (``tests/runtime/deaths.py``).
        self.deaths = self.directory / "deaths"
        more = f"{emulated.VARIABLE}={self.directory / 'rm'}", f"{deaths.VARIABLE}={self.deaths}"
        options = "--config", str(self.directory / "qgpud.toml")
        self._manager = Manager(self.directory, "seccomp", ("env", driver, *more), options)
        self._manager.runtime_dir = self.runtime_dir
        self._process: subprocess.Popen[bytes] | None = None
        self.clients = itertools.count(emulated.FIRST_NUMBERED)
        self.files_of_driver = emulated.files_of(self.directory / "rm")
        self.files_of_driver.mkdir()

    @property
    def perils(self) -> tuple[str, ...]:
        """The guardian too."""
        return (*super().perils, "guardian", "guardian")

    def runs(self, *parts: str) -> bool:
        """Whether all of these parts are there."""
        others = [part for part in parts if part != "qgpud"]
        return super().runs(*others) and ("qgpud" not in parts or self._process is not None)

    def start_daemon(self) -> None:
        """Have the service manager start qgpud with what it keeps, and wait until it serves."""
        self._process = self._manager.start()
        self.eventually(self.daemon_answers)

    def kill_daemon(self) -> None:
        """Kill qgpud. The guardian goes on."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._manager.listen()

    def fail(self, part: str) -> None:
        """Kill a part, or switch the node off."""
        self.kill_guardian() if part == "guardian" else super().fail(part)

    def kill_guardian(self) -> None:
        """Kill the guardian, if there is one."""
        with suppress(QgpuError, OSError):
            link = GuardianLink(self.runtime_dir / "guardian.sock")
            link.close()
            os.kill(int(link.hello["pid"]), signal.SIGKILL)

    def switch_off(self) -> None:
        """Lose the guardian, what the service manager keeps, and what the driver knows."""
        self.kill_daemon()
        self._end_guardians()
        self._manager.forget()
        super().switch_off()
        (self.directory / "rm").unlink(missing_ok=True)

    def ask(self, operation: str) -> dict[str, Any]:
        """Make a request to qgpud; between two guardians it does not answer."""
        self._manager.listen()

        def asked() -> list[dict[str, Any]]:
            with suppress(QgpuError):
                return [super(GuardedWorld, self).ask(operation)]
            return []

        found: dict[str, Any] = self.eventually(asked)[0]
        return found

    def container(self, pod: str, devices: list[str], name: str = "main") -> Container:
        """Make a container with a client of the emulated driver's."""
        return GuardedContainer(self, pod, devices, name)

    def close(self) -> None:
        """End everything."""
        self.kill_daemon()
        self._end_guardians()
        self._manager.close()
        super().close()

    def _end_guardians(self) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "qgpu.guardian" in words and str(self.runtime_dir) in words:
                    process.kill()
                    process.wait(PATIENCE_S)


def main() -> None:
    """Be the process of a container: wait for the filter, then ask for memory of the sizes that are sent."""
    sock, client = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    lines = sock.makefile("rw", buffering=1)
    lines.readline()
    listener = install()
    socket.send_fds(sock, [b"listener"], [listener])
    os.close(listener)
    program = None
    for line in lines:
        if program is None:
            program = Program(client)
            program.call(abi.NV_ESC_RM_ALLOC, device(client=client), DEVICE_PARAMS)
            program.call(abi.NV_ESC_RM_ALLOC, subdevice(client=client), bytes(4))
        asked = alloc(_HANDLE, 2, abi.NV01_MEMORY_LOCAL_USER, client)
        error, argument, _ = program.call(abi.NV_ESC_RM_ALLOC, asked, memory_params(int(line)))
        status = alloc_status(argument)
        if not error and status == abi.NV_OK:
            program.call(abi.NV_ESC_RM_FREE, free(_HANDLE, client))
        lines.write(f"{status if not error else 0x10000 + error}\n")


if __name__ == "__main__":
    main()
