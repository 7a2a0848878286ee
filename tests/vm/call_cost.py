"""In a guest: what a forwarded control costs without the module and with it, simulated driver or NVIDIA's own.

    lane.py [--count] [--driver 580] --results FILE --row ROW --script tests/vm/call_cost.py [ALTERNATIONS]

The module comes and goes, and each ratio is of calls that lie between two measurements without it. With ``--count`` the
guest's clock counts instructions: then every alternation says the same, whatever the host's load. The host's clock says
how long the emulator takes, which depends on its neighbours: hence the middle of many alternations, and how far they
lie apart.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("guest", "real")]

import qg  # noqa: E402  (folders of scripts)

REAL = os.environ["QGPU_VM_REAL"]
CGROUP = qg.CGROUPS / "cost"
HAMMER = str(qg.BUILD / "hammer")
#: Short rounds, of which the best counts: one in which the host did something else costs more.
CALLS, ROUNDS = 2000, 8


def per_call(*where: str) -> float:
    """ns (or instructions) of a forwarded control."""
    run = [HAMMER, str(CALLS), *where]
    return min(float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) for _ in range(ROUNDS))


def load() -> None:
    """Load the module, over a real driver with its glue."""
    if REAL:
        import modules  # it knows real drivers only

        modules.load()
    else:
        qg.insmod("qgpu.ko")


def unload() -> None:
    """Unload what load() loaded."""
    for name in ("qgpu_rm", "qgpu"):
        if qg.loaded(name):
            qg.rmmod(name)


def alternation() -> dict[str, float]:
    """Return the cost in each state, and without the module: the mean of before and after."""
    before = per_call()
    load()
    device = qg.Qgpu()
    assert device.info().state == qg.N["QGPU_STATE_ENFORCING"]
    found = {"no_pods": per_call()}
    fd = os.open(CGROUP, os.O_RDONLY)
    device.ioctl("POD_ADD", cgroup_fd=fd, name=b"cost")
    os.close(fd)
    found |= {"outside_pods": per_call(), "pod": per_call(str(CGROUP / "cgroup.procs"))}
    device.close()
    unload()
    return found | {"without_module": (before + per_call()) / 2}


def main() -> None:
    CGROUP.mkdir()
    if REAL:
        qg.insmod("fakepci.ko", f"memory={os.environ['QGPU_VM_CARD']}")
    with qg.driver():
        found = [alternation() for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60)]
    unit = "instructions" if os.environ["QGPU_VM_COUNTED"] == "1" else "ns"
    qg.note("alternations", len(found))
    for state in found[0]:
        qg.note(f"ioctl_{unit}_{state}", statistics.median(each[state] for each in found))
        if state != "without_module":
            ratios = [each[state] / each["without_module"] for each in found]
            quarters = statistics.quantiles(ratios, n=4)
            for name, value in zip(("_q1", "", "_q3"), quarters, strict=True):
                qg.note(f"ioctl_ratio_{state}{name}", value)


if __name__ == "__main__":
    main()
