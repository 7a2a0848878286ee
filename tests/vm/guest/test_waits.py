"""What the module waits for, and whom it makes wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import nv
import pytest
import qg
from faults import ENFORCE

PROBES = Path("/sys/kernel/debug/kprobes/enabled")
SIM = Path("/sys/module/nvidia/parameters")
TRACING = Path("/sys/kernel/tracing")
AT_ONCE = Path("/sys/module/nvidia/parameters/at_once")


def test_a_pod_has_32_inspected_calls_in_the_driver_at_most(web, linger):
    """Each needs an instance of the probe on rm_ioctl, of which there are so many; a pod must not take them all."""

    def flood(state):
        p = state["p"]
        threads = [threading.Thread(target=p.control, args=(p.subdevice, 0x20801701)) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    linger(3_000_000)  # longer than all threads take to start
    AT_ONCE.write_text("0")
    web.processes[0].run(flood)

    assert int(AT_ONCE.read_text()) == 32


@pytest.mark.parametrize("sealed", [True, False])
def test_a_client_handle_given_again_during_a_release_is_new(qgpu, pod, sealed):
    """RM gives it out as soon as it has freed the client, before the release of the file returns."""

    def program(state):
        state["p"] = nv.Program()
        return state["p"].client

    a, b = pod("a"), pod("b")
    handle = a.process().run(program)
    (SIM / "close_late_us").write_text("1000000")
    PROBES.write_text(str(int(sealed)))
    leaves = threading.Thread(target=a.processes[0].kill)
    leaves.start()
    qg.until(lambda: qg.sim()["clients"] == 0)
    (SIM / "next_client").write_text(str(handle))
    again = b.process().run(program)
    known = b.info().nr_clients
    (SIM / "close_late_us").write_text("0")
    PROBES.write_text("1")
    leaves.join()

    assert (again, known) == (handle, 1)
    assert b.info().nr_clients == 1


#: Functions of the kernel that wait for tasks, by a name for events.
WAITS = {"tasks": "synchronize_rcu_tasks", "calls": "call_srcu", "releases": "synchronize_srcu"}


@pytest.fixture
def trace(module) -> Iterator[Path]:
    """What waits for tasks on the way out of the driver, in order."""
    if not TRACING.joinpath("kprobe_events").exists():
        qg.mount("tracefs", TRACING)
    if not TRACING.joinpath("kprobe_events").exists():
        pytest.skip("this kernel has no events by kprobes")
    events = TRACING / "kprobe_events"
    lines = [f"p:qg/{name} {function}" for name, function in WAITS.items()]
    lines += ["p:qg/leave qgpu:qgpu_interpose_leave", "r:qg/left qgpu:qgpu_interpose_leave"]
    events.write_text("\n".join(lines))
    enable = TRACING / "events/qg/enable"
    (TRACING / "trace").write_text("")
    enable.write_text("1")
    yield TRACING / "trace"
    enable.write_text("0")
    events.write_text("")


def test_leaving_waits_for_tasks_before_and_after_calls(trace):
    """A wait for tasks sees who is between the driver's table and our section, a wait for calls who is inside.

    Then the same for release(), which is given back last. The last wait for tasks sees who is behind the section.
    """
    ENFORCE.write_text("0")
    own = f"-{os.getpid()} "  # the optimizer of probes waits for tasks too
    lines = [line for line in trace.read_text().splitlines() if own in line]
    seen = [name for line in lines for name in ("leave", "left", *WAITS) if f": {name}: (" in line]
    ENFORCE.write_text("1")

    left = [*("leave", "tasks", "calls"), *("tasks", "releases"), "tasks", "left"]
    assert seen[seen.index("leave") : seen.index("left") + 1] == left
