"""Fixtures of the VM suite. Outside the VM nothing here is collected."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if os.environ.get("QGPU_VM_BUILD") and not os.environ.get("QGPU_VM_REAL") else ["test_*.py"]

if not collect_ignore_glob:
    import programs
    import qg


KMEMLEAK = Path("/sys/kernel/debug/kmemleak")


def leaks() -> list[str]:
    """What kmemleak says was lost, after a scan of objects old enough; nothing where it is not built in."""
    if not KMEMLEAK.exists():
        return []
    for _ in range(2):
        time.sleep(6)  # younger objects are not looked at
        KMEMLEAK.write_text("scan")
    return [
        block for block in KMEMLEAK.read_text().split("unreferenced object") if "qgpu" in block or "nvidia" in block
    ]


LOCKDEP = Path("/proc/lockdep_stats")


def lockdep_watches() -> bool:
    """False where lockdep was built in and has switched itself off: at its first report, or out of room."""
    if not LOCKDEP.exists():
        return True
    on = re.search(r"debug_locks:\s*1$", LOCKDEP.read_text(), re.MULTILINE) is not None
    qg.note("lockdep_on_at_the_end", int(on))
    return on


@pytest.fixture(scope="session", autouse=True)
def _driver() -> Iterator[None]:
    if KMEMLEAK.exists():
        KMEMLEAK.write_text("scan=off")  # its own scans would take most of the time
    with qg.driver():
        yield
    lost = leaks()
    if KMEMLEAK.exists():
        qg.note("kmemleak_in_modules", len(lost))
    assert not lost, lost[:3]
    assert lockdep_watches()


@pytest.fixture(scope="session")
def figure() -> Callable[[str, float], None]:
    return qg.note


@pytest.fixture
def module(_driver: None) -> Iterator[None]:
    """qgpu.ko loaded; afterwards nothing may be left of what the test did."""
    qg.insmod("qgpu.ko")
    yield
    qg.rmmod("qgpu")


@pytest.fixture
def qgpu(module: None) -> Iterator[qg.Qgpu]:
    opened = qg.Qgpu()
    yield opened
    opened.close()


@pytest.fixture
def pod(qgpu: qg.Qgpu) -> Iterator[Callable[..., qg.Pod]]:
    """Make pods; they end with the test, and with them all they had."""
    made: list[qg.Pod] = []

    def make(name: str, **grant: int) -> qg.Pod:
        made.append(qg.Pod(qgpu, name, **grant))
        return made[-1]

    yield make
    for each in made:
        each.close()
    qg.until(lambda: qgpu.info().nr_clients == 0)
    info, sim = qgpu.info(), qg.sim()
    assert (info.nr_objects, sim["clients"], sim["objects"]) == (0, 0, 0)
    assert sim["free"] == sim["total"]


@pytest.fixture
def web(pod: Callable[..., qg.Pod]) -> qg.Pod:
    """A pod of 64 MiB with a program in it."""
    made = pod("web", memory=(64 << 20) + programs.ROOM)
    made.process().run(programs.program)
    return made


@pytest.fixture
def outside() -> Iterator[dict[str, object]]:
    """Run a program that is in no pod."""
    state: dict[str, object] = {}
    programs.program(state)
    yield state
    state["p"].close()  # type: ignore[attr-defined]


@pytest.fixture
def parameter() -> Iterator[Callable[[str, object], None]]:
    """Set parameters of the simulated driver; as they were afterwards."""
    was: dict[Path, str] = {}

    def put(name: str, value: object) -> None:
        path = Path("/sys/module/nvidia/parameters", name)
        was.setdefault(path, path.read_text())
        path.write_text(str(value))

    yield put
    for path, value in was.items():
        path.write_text(value)


@pytest.fixture
def linger(parameter: Callable[[str, object], None]) -> Callable[[int], None]:
    """Set how long a call waits in the driver before it is looked at, in us."""
    return partial(parameter, "linger_us")


@pytest.fixture
def late(parameter: Callable[[str, object], None]) -> Callable[[int], None]:
    """Set how long a call stays in the driver when it is done, in us."""
    return partial(parameter, "late_us")
