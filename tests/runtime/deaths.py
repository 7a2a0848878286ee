"""Kills a daemon or guardian at a step of a container's start: whoever reaches a step with a death ordered for it.

A death is a file in the folder that DEATHS names, called after the step. Each kills one process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "DEATHS"

#: The steps of a start, in order, by where they are done: each may be a process's last, before or after it.
STEPS = {
    "bind": ("qgpu.daemon.container_requests", "ContainerRequests.bind"),
    "reserve": ("qgpu.daemon.claim_requests", "ClaimRequests._make_room"),
    "note": ("qgpu.daemon.container_notes", "write"),
    "simulated admission": ("qgpu.planes.sim.host", "SimHost.admit"),
    "simulated keeping": ("qgpu.planes.sim.host", "SimHost._keep"),
    "admission": ("qgpu.planes.seccomp.host", "SeccompHost.admit"),
    "guardian's admission": ("qgpu.guardian.daemon_requests", "DaemonRequests._op_admit"),
    "agent's work": ("qgpu.runtime.agent", "Agent._take"),
    "attachment": ("qgpu.planes.seccomp.host", "SeccompHost.attach"),
    "guardian's attachment": ("qgpu.guardian.daemon_requests", "DaemonRequests._op_attach"),
    "guardian's listening": ("qgpu.guardian.proxy.listeners", "Listeners.add"),
    "holding": ("qgpu.planes.seccomp.host", "SeccompHost._hold"),
    "first call": ("qgpu.guardian.proxy.dispatcher", "Dispatcher.serve"),
    "retirement": ("qgpu.guardian.daemon_requests", "DaemonRequests._op_retire"),
}


def order(folder: Path, step: str, times: int = 1) -> None:
    """Let so many processes die at a step, such as "before bind"."""
    folder.mkdir(exist_ok=True)
    for number in range(times):
        (folder / f"{step} {number}").touch()


def clear(folder: Path) -> list[str]:
    """Take back the deaths that nobody died, and return them."""
    found = list(folder.glob("*"))
    for each in found:
        each.unlink(missing_ok=True)
    return [each.name for each in found]


def _die(folder: Path, step: str) -> None:
    for each in folder.glob(f"{step} *"):
        try:
            each.unlink()
        except FileNotFoundError:  # another process has died of it
            continue
        os.kill(os.getpid(), signal.SIGKILL)


def _deadly(step: str, done: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @functools.wraps(done)
    def through(*arguments: Any, **more: Any) -> Any:
        _die(folder, f"before {step}")
        result = done(*arguments, **more)
        _die(folder, f"after {step}")
        return result

    return through


class _Finder(importlib.abc.MetaPathFinder):
    """Makes the steps of a module deadly when it is imported: importing it sooner would slow down every start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, *_: Any) -> Any:
        steps = {step: where for step, (module, where) in STEPS.items() if module == name}
        if not steps:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def load(module: Any) -> None:
            run(module)
            for step, where in steps.items():
                *inside, method = where.split(".")
                owner = functools.reduce(getattr, inside, module)
                setattr(owner, method, _deadly(step, getattr(owner, method), self._folder))

        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Make the steps deadly in this process."""
    sys.meta_path.insert(0, _Finder(Path(os.environ[VARIABLE])))
