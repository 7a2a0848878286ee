"""In a guest of mutants.py: the tests of each mutation, one after another, against the module that was built with it.

    mutants_guest.py FILE       a JSON list of {"name", "built", "test", "only"}

What all tests import is imported once, and a fork runs each: in an emulator the imports take longer than most tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies  # noqa: F401
import pytest
import pytest_timeout  # noqa: F401
from _pytest.config import default_plugins

import qgpu.planes.kmod.uapi  # noqa: F401

SHARE = Path("/run/share")
#: For one test, and for all of one mutation.
TEST_S, PATIENCE_S = 150, 300
TIMED_OUT = 124

_CLEAN = """
dmesg -c >/run/share/dmesg.{name}
for m in qgpu_rm qgpu nvidia_uvm nvidia; do
  [ ! -d /sys/module/$m ] || timeout 20 rmmod $m 2>/dev/null || [ ! -d /sys/module/$m ] || exit 1
done
for c in /sys/fs/cgroup/*/cgroup.kill; do [ ! -e $c ] || echo 1 >$c; done
sleep 0.2; rmdir /sys/fs/cgroup/*/ 2>/dev/null
exit 0
"""


def run(name: str, built: str, test: str, only: str) -> int:
    """Return the status pytest ends with."""
    child = os.fork()
    if not child:
        os.setsid()
        os.environ["QGPU_VM_BUILD"] = built
        for stream in (1, 2):
            os.dup2(os.open(SHARE / f"log.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-m", "vm", f"--timeout={TEST_S}"]
        status = int(pytest.main([*options, test, *(["-k", only] if only else [])]))
        sys.stdout.flush()
        os._exit(status)
    end = time.monotonic() + PATIENCE_S
    ended = (0, 0)
    while not ended[0] and time.monotonic() < end:
        time.sleep(0.1)
        ended = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started too
    if not ended[0]:
        os.waitpid(child, 0)
        return TIMED_OUT
    return os.waitstatus_to_exitcode(ended[1])


def main() -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = False  # into the guest's own memory
    for plugin in default_plugins:
        importlib.import_module(f"_pytest.{plugin}")
    todo: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for each in todo:
        name = each["name"]
        (SHARE / "running").write_text(name)
        status = run(**each)
        (SHARE / f"ended.{name}").write_text(str(status))
        if subprocess.run(["/bin/sh", "-c", _CLEAN.format(name=name)], check=False).returncode:
            sys.exit(1)


if __name__ == "__main__":
    main()
