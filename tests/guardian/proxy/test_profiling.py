"""What profilers ask for: refused by name without the grant; with it asked of RM, but of nobody else's objects."""

from __future__ import annotations

import errno
import os
import signal
import struct
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.proxy import bound_monitors, rm_calls
from qgpu.guardian.rules import classes, controls, profiling, tools
from qgpu.guardian.rules.rows import Control, Why
from qgpu.linux import capabilities, proc, thread_freezer
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, alloc_status, control, free, status
from tests.guardian.pod import MAJOR, MINOR
from tests.traces import ARGUMENT, TOOLS, decode
from tests.traces import rows as calls_of

CONTROLS = [row for row in controls.ROWS if row.why is Why.PROFILING]
CLASSES = [row for row in classes.ROWS if row.why is Why.PROFILING]
FLUSH_BYTES = abi.sizeof("NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS")
#: Zeros only, as ncu asks them.
WITHOUT_ARGUMENTS = (0x2080A06D, 0x2080A0C8)
NEIGHBOURS = 8
(NCU,) = (trace for trace in TOOLS if "nsight-compute" in trace.name)


def by_name(row):
    return controls.name(row.number) if isinstance(row, Control) else row.name


def flush(flags):
    params = bytearray(FLUSH_BYTES)
    struct.pack_into("<I", params, abi.offsetof("NV2080_CTRL_FB_FLUSH_GPU_CACHE_PARAMS", "flags"), flags)
    return bytes(params)


def ask(pod, command, params, client=7, target=3):
    pod.rm.seen.clear()
    return status(pod.call(abi.NV_ESC_RM_CONTROL, control(command, target, len(params), client), params)[2])


def params_of(row):
    return flush(abi.FLUSH_WHOLE_CACHE) if row.number == abi.NV2080_FB_FLUSH_GPU_CACHE else bytes(256)


@pytest.fixture
def profiled(on_card):
    on_card.profiling = True
    return on_card


@pytest.mark.parametrize("row", CONTROLS, ids=by_name)
def test_a_profilers_control_needs_the_grant(on_card, row):
    assert ask(on_card, row.number, params_of(row)) == abi.NV_ERR_NOT_SUPPORTED
    assert on_card.rm.seen == []
    assert "--allow-profiling" in tools.advice(name for _, name in on_card.shared.refusals.counts)[0]


@pytest.mark.parametrize("row", CLASSES, ids=by_name)
def test_a_profilers_class_needs_the_grant(on_card, row):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, row.number), bytes(256))

    assert alloc_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert 30 not in {handle for _, handle in on_card.rm.objects}
    assert on_card.shared.refusals.counts["web", row.name] == 1


@pytest.mark.parametrize("row", CONTROLS, ids=by_name)
def test_a_profilers_control_is_asked_of_rm_with_the_grant(profiled, row):
    assert ask(profiled, row.number, params_of(row)) == abi.NV_OK
    assert len(profiled.rm.seen) == 1


def test_a_profilers_call_that_the_driver_refuses_is_told(profiled, monkeypatch):
    perform = profiled.rm.perform

    def refuse(fd, request, argument):
        result = perform(fd, request, argument)
        struct.pack_into("<I", abi.ffi.buffer(argument), 40, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
        return result

    monkeypatch.setattr(profiled.dispatcher._proxy, "_perform", refuse)
    profiled.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, 0xB2CC), bytes(256))

    assert list(profiled.shared.refusals.counts) == [
        ("web", "MAXWELL_PROFILER_DEVICE by the driver, for lack of permission")
    ]


def test_a_grant_taken_back_is_gone_for_the_next_call(profiled):
    profiled.profiling = False

    assert ask(profiled, 0xB0CC010A, bytes(256)) == abi.NV_ERR_NOT_SUPPORTED


@pytest.mark.parametrize("flags", [0x00, 0x18, 0x14, 0x0C, 0x1E, 0x3C, 0x1F])
def test_flush_by_address_or_without_writing_is_refused(profiled, flags):
    assert ask(profiled, abi.NV2080_FB_FLUSH_GPU_CACHE, flush(flags)) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert profiled.rm.seen == []


def registers(*numbers, count=None):
    """Parameters that read registers; ``count`` of them, or as many as there are."""
    params = abi.ffi.new("NVB0CC_CTRL_EXEC_REG_OPS_PARAMS *")
    params.regOpCount = len(numbers) if count is None else count
    for entry, number in zip(params.regOps, numbers, strict=False):
        entry.regOffset = number
    return bytes(abi.ffi.buffer(params))


@given(st.lists(st.integers(profiling.FIRST_REGISTER, 2**32 - 1), max_size=124))
def test_a_list_of_counters_registers_may_be_asked(numbers):
    assert not profiling.refuses(abi.NVB0CC_EXEC_REG_OPS, registers(*numbers))


@given(st.data(), st.lists(st.integers(0, 2**32 - 1), max_size=123), st.integers(0, profiling.FIRST_REGISTER - 1))
def test_a_register_of_bus_or_scheduler_refuses_its_list(data, others, low):
    at = data.draw(st.integers(0, len(others)))

    assert profiling.refuses(abi.NVB0CC_EXEC_REG_OPS, registers(*others[:at], low, *others[at:]))


@given(st.integers(125, 2**32 - 1))
def test_a_list_longer_than_its_parameters_is_refused(count):
    assert profiling.refuses(abi.NVB0CC_EXEC_REG_OPS, registers(*(0x13CC14,) * 124, count=count))


@given(st.binary(max_size=600))
def test_no_list_of_registers_breaks_the_check(params):
    assert profiling.refuses(abi.NVB0CC_EXEC_REG_OPS, params) in {True, False}


def test_the_scheduler_is_not_reached_by_a_list_of_registers(profiled):
    answer = ask(profiled, abi.NVB0CC_EXEC_REG_OPS, registers(0x13CC14, 0x2630))

    assert answer == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert profiled.rm.seen == []


@pytest.mark.parametrize("command", WITHOUT_ARGUMENTS, ids=hex)
@pytest.mark.parametrize("params", [b"\1" + bytes(55), bytes(55) + b"\1"], ids=["first", "last"])
def test_what_firmware_reads_unseen_has_no_arguments(profiled, command, params):
    assert ask(profiled, command, params) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert profiled.rm.seen == []


@pytest.mark.parametrize("command", WITHOUT_ARGUMENTS, ids=hex)
def test_what_firmware_reads_is_not_on_a_neighbours_client(profiled, command):
    assert ask(profiled, command, bytes(56), NEIGHBOURS) == abi.NV_ERR_INVALID_CLIENT
    assert profiled.rm.seen == []


def test_profilers_capability_holds_for_their_calls_only(profiled, monkeypatch):
    raised = []
    monkeypatch.setattr(capabilities, "with_one", lambda capability: raised.append(capability) or nullcontext())
    ask(profiled, 0x20800110, bytes(8))
    ask(profiled, abi.NVA06C_PREEMPT, bytes(8))
    assert raised == []

    ask(profiled, 0xB0CC0101, bytes(8))
    profiled.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, 0xB2CC), bytes(256))
    assert raised == [capabilities.CAP_PERFMON] * 2


def test_debugged_process_is_refused_a_client_by_name(pod, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(thread_freezer, "run_as_tracer", fail)
    pid = pod.process.pid
    assert alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, 0, client=0))[2]) == abi.NV_ERR_INVALID_STATE
    assert pod.shared.refusals.counts["web", "call while other threads run"] == 1
    tracer = os.fork()
    if not tracer:
        thread_freezer._libc.ptrace(thread_freezer._SEIZE, pid, None, None)
        signal.pause()
    try:
        while f"TracerPid:\t{tracer}" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.005)
        pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, 0, client=0))
    finally:
        os.kill(tracer, signal.SIGKILL)
        os.waitpid(tracer, 0)

    assert pod.shared.refusals.counts["web", tools.DEBUGGED] == 1


@pytest.mark.parametrize("granted", [False, True])
def test_control_file_for_events_needs_the_grant(on_card, monkeypatch, granted):
    """Afterwards the kernel makes nothing more on either file for the pod: both reach the other's clients."""
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", MINOR)
    on_card.profiling = granted
    ended = []
    monkeypatch.setattr(on_card.shared.files.devices, "add", ended.append)
    on_card.rm.seen.clear()
    fd = next(fd for fd, device in proc.devices(on_card.process.pid) if device == os.makedev(MAJOR, MINOR))

    assert (on_card.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", fd))[0] == 0) == granted
    assert len(on_card.rm.seen) == granted
    assert len(ended) == 2 * granted
    on_card.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", 0))
    assert len(ended) == 2 * granted, "a file of another kind may not return from its poll"
    names = {name for _, name in on_card.shared.refusals.counts}
    assert ("--allow-profiling" in "".join(tools.advice(names))) == (not granted)


@pytest.mark.parametrize("granted", [False, True])
def test_recorded_ncu_needs_nothing_but_the_grant(on_card, granted):
    """Its own calls, on this pod's client. RM itself refuses the tick frequency when ncu runs plainly."""
    on_card.profiling = granted
    for row in calls_of(NCU):
        asked = decode(row.request, ARGUMENT, row.reader())
        if isinstance(asked, rm_calls.Control) and asked.command in {each.number for each in CONTROLS} | {0x20800407}:
            ask(on_card, asked.command, row.params)
        elif isinstance(asked, rm_calls.Alloc) and asked.rm_class in {each.number for each in CLASSES}:
            on_card.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, asked.rm_class))
    names = {name for _, name in on_card.shared.refusals.counts}

    assert ("MAXWELL_PROFILER_DEVICE" in names, "NVB0CC_CTRL_CMD_EXEC_REG_OPS" in names) == (not granted, not granted)
    assert names == {"NV2080_CTRL_CMD_TIMER_SET_GR_TICK_FREQ"} or not granted


@pytest.fixture
def waits(profiled, monkeypatch):
    """A pod with a profiler whose turn comes after 40 ms; the list of its waits before a call reached RM."""
    profiled.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, 0xB2CC), bytes(256))
    profiled.call(abi.NV_ESC_RM_ALLOC, alloc(31, 3, 0xB2CC), bytes(256))
    profiled.rm.seen.clear()
    profiled.shared.until_own_turn = lambda pod, client, _held_ns: {("web", 7): 40_000_000}[pod, client]
    waited = []
    monkeypatch.setattr(bound_monitors, "time", SimpleNamespace(sleep=lambda s: waited.append((s, *profiled.rm.seen))))
    return waited


@pytest.mark.parametrize("command", sorted(bound_monitors.HOLDING), ids=hex)
def test_a_call_that_binds_monitors_waits_for_the_pods_turn(profiled, waits, command):
    assert ask(profiled, command, b"", target=30) == abi.NV_OK
    assert waits == [(0.04,)]
    assert len(profiled.rm.seen) == 1


@pytest.mark.parametrize("freed", [30, 3, 2, 7], ids=["profiler", "subdevice", "device", "client"])
def test_a_free_that_unbinds_monitors_waits_for_the_pods_turn(profiled, waits, freed):
    ask(profiled, abi.NVB0CC_BIND_PM_RESOURCES, b"", target=30)
    waits.clear()
    profiled.call(abi.NV_ESC_RM_FREE, free(freed))

    assert len(waits) == 1
    assert (7, freed) not in profiled.rm.objects


def test_a_free_of_something_else_does_not_wait(profiled, waits):
    ask(profiled, abi.NVB0CC_BIND_PM_RESOURCES, b"", target=30)
    waits.clear()
    profiled.call(abi.NV_ESC_RM_FREE, free(31))

    assert not waits


def test_unbound_monitors_are_freed_without_a_wait(profiled, waits):
    ask(profiled, abi.NVB0CC_BIND_PM_RESOURCES, b"", target=30)
    ask(profiled, abi.NVB0CC_UNBIND_PM_RESOURCES, b"", target=30)
    waits.clear()
    profiled.call(abi.NV_ESC_RM_FREE, free(30))

    assert not waits
