"""The table of rules in the module: it refuses what the guardian refuses, of pods and of nobody else."""

from __future__ import annotations

import errno
import os
import struct

import nv
import pytest

from qgpu.guardian.rules import classes, controls, escapes, scheduling
from qgpu.guardian.rules.rows import InModule
from tests import rm_data

#: Refused for what they say, or answered by the module itself: tests of their own.
_BY_PARAMETERS = {InModule[each] for each in ("TIMESLICE", "PREEMPTION_MODE", "SHARE_POLICY", "BIND", "PREEMPT")}
JUDGED = {row.number for row in controls.ROWS if row.module in _BY_PARAMETERS}
#: Not of any driver.
UNKNOWN = (0x00000100, 0x12345, 0x20800000, 0x20807FFF, 0x2080FFF1, 0xA06C8105, 0xC86F0103, 0xFFFFFFFF)


def program(state):
    p = state["p"] = nv.Program()
    state["handles"] = {"root": p.client, "subdevice": p.subdevice}


def ask_all(state, numbers):
    """Ask for controls with parameters of no bytes; the statuses."""
    said = []
    for number in numbers:
        try:
            state["p"].control(state["handles"]["subdevice"], number)
            said.append(0)
        except nv.RmError as error:
            said.append(error.status)
    return said


def make_all(state, numbers, by):
    """Make an object of each class, and free it; the statuses."""
    p, said = state["p"], []
    for number in numbers:
        try:
            p.free(p.old_memory(number) if by == "RM_ALLOC_MEMORY" else p.alloc(p.device, number))
            said.append(0)
        except nv.RmError as error:
            said.append(error.status)
    return said


@pytest.fixture
def web(pod):
    made = pod("web")
    made.process().run(program)
    return made


@pytest.fixture
def outside():
    state = {}
    program(state)
    yield state
    state["p"].close()


def recorded(read):
    return sorted({each.number for driver in rm_data.DRIVERS for each in read(driver)})


def wrap(state):
    """From now on issue calls inside the call that wraps others."""
    state["p"].send = nv.xfer


def test_every_recorded_control_has_a_row(figure):
    unclassified = {number for number in recorded(rm_data.controls) if number not in controls.CONTROLS}
    figure("unclassified_controls", len(unclassified))

    assert not unclassified


@pytest.mark.parametrize("form", ["plain", "wrapped"])
def test_controls_are_refused_as_by_the_guardian(web, outside, figure, form):
    if form == "wrapped":
        web.processes[0].run(wrap)
    numbers = [number for number in (*recorded(rm_data.controls), *UNKNOWN) if number not in JUDGED]
    refused = {number: controls.refusal(number) for number in numbers if number not in controls.ALLOWED}
    without = dict(zip(numbers, ask_all(outside, numbers), strict=True))
    differing, inside = set(), {}
    for number in numbers:
        before = web.info().refused_controls
        (inside[number],) = web.processes[0].run(ask_all, [number])
        if (web.info().refused_controls > before) is not (number in refused):
            differing.add(hex(number))
    differing |= {hex(number) for number in numbers if inside[number] != refused.get(number, without[number])}
    figure(f"rules_differing_controls_{form}", len(differing))

    assert not differing


@pytest.mark.parametrize("by", ["RM_ALLOC", "RM_ALLOC_MEMORY"])
def test_classes_are_refused_as_by_the_guardian(web, figure, by):
    roots = {0x0000, 0x0001, 0x0041}
    numbers = [number for number in (*recorded(rm_data.classes), 0xFFFF, 0x9010) if number not in roots]
    allowed = classes.ALLOWED.keys() if by == "RM_ALLOC" else {0x3E, 0x71}
    said = dict(zip(numbers, web.processes[0].run(make_all, numbers, by), strict=True))

    differing = {hex(number) for number in numbers if (said[number] == nv.BAD_CLASS) is (number in allowed)}
    figure(f"rules_differing_classes_{by.lower()}", len(differing))

    assert not differing


def test_processes_outside_pods_ask_for_anything(web, outside):
    numbers = [row.number for row in controls.ROWS if not row.why.allowed and row.number != 0xA06C0103]
    kinds = [row.number for row in classes.ROWS if not row.why.allowed and row.number not in (0x0000, 0x0001, 0x0041)]

    assert not {nv.NO_PERMISSION} & set(ask_all(outside, numbers))
    assert not {nv.BAD_CLASS, nv.NO_PERMISSION} & set(make_all(outside, kinds, "RM_ALLOC"))
    assert (web.info().refused_controls, web.info().refused_allocs) == (0, 0)


def test_a_removed_pod_asks_for_anything(qgpu, pod):
    gone = pod("gone")
    process = gone.process()
    process.run(program)
    refused = process.run(ask_all, [0x80170F])
    qgpu.ioctl("POD_REMOVE", pod=gone.id)

    assert (refused, process.run(ask_all, [0x80170F])) == ([nv.NO_PERMISSION], [0])


def name_client(state, cmd, client, size):
    try:
        state["p"].control(state["handles"]["subdevice"], cmd, struct.pack("I", client).ljust(size, b"\0"))
    except nv.RmError as error:
        return error.status
    return 0


@pytest.mark.parametrize(("cmd", "size"), [(0x20801208, 20), (0xDA0002, 24)])
def test_a_control_on_a_client_of_others_is_refused(web, outside, cmd, size):
    own = web.processes[0].run(lambda state: state["p"].client)
    process = web.processes[0]

    assert process.run(name_client, cmd, outside["p"].client, size) == nv.BAD_HANDLE
    assert [process.run(name_client, cmd, client, size) for client in (0, own)] == [0, 0]
    assert web.info().refused_controls == 1


def test_handles_in_parameters_of_another_size_are_no_clients(web, outside):
    assert web.processes[0].run(name_client, 0xDA0002, outside["p"].client, 40) == 0


@pytest.mark.parametrize(("cls", "at"), [(0x80, 4), (0x80, 8), (0x79, 0), (0x83DE, 4)])
def test_an_object_of_a_client_of_others_is_refused(web, outside, cls, at):
    def make(state, cls, at, client):
        p = state["p"]
        params = bytes(at) + struct.pack("I", client) + bytes(64 - at)
        try:
            p.free(p.alloc(p.client if cls == 0x80 else p.device, cls, params))
        except nv.RmError as error:
            return error.status
        return 0

    own = web.processes[0].run(lambda state: state["p"].client)

    assert web.processes[0].run(make, cls, at, outside["p"].client) == nv.BAD_HANDLE
    assert [web.processes[0].run(make, cls, at, client) for client in (0, own)] == [0, 0]


def make_for_engines(state, engines, alone):
    """Make a TSG, or a channel without one, for each engine, and free it; the statuses."""
    p, said = state["p"], []
    for engine in engines:
        try:
            p.free(p.alloc(p.device, nv.CHANNEL, struct.pack("128xI232x", engine)) if alone else p.tsg(engine))
            said.append(0)
        except nv.RmError as error:
            said.append(error.status)
    return said


@pytest.mark.parametrize("alone", [False, True], ids=["TSG", "channel"])
def test_engines_are_refused_as_by_the_guardian(web, outside, alone):
    """RM runs the channels of others, such as the software engine's, where no share counts them."""
    engines = [*range(100), 0x80000001, 0xFFFFFFFF]
    refused = {engine for engine in engines if engine and engine not in scheduling.ENGINES}

    said = web.processes[0].run(make_for_engines, engines, alone)

    assert said == [nv.BAD_ARGUMENT if engine in refused else 0 for engine in engines]
    assert web.info().refused_allocs == len(refused)
    assert make_for_engines(outside, engines, alone) == [0] * len(engines)


def test_a_channel_in_a_tsg_names_any_engine(web):
    """RM runs it with its TSG."""

    def make(state):
        p = state["p"]
        p.free(p.alloc(p.tsg(), nv.CHANNEL, struct.pack("128xI232x", 0x23)))

    web.processes[0].run(make)


@pytest.mark.parametrize("limit", [None, 64 << 20], ids=["no limit", "a limit"])
def test_escapes_are_refused_as_by_the_guardian(pod, figure, limit):
    def escape(state, number, size):
        fd = state.setdefault("fd", os.open(nv.CTL, os.O_RDWR))
        try:
            nv.call(fd, number, bytearray(size))
        except OSError as error:
            return error.errno == errno.EOPNOTSUPP
        return False

    made = pod("web", **({"memory": limit} if limit else {}))
    process = made.process()

    differing = set()
    for row in escapes.ROWS:
        when = row.in_module or row.refused
        refused = when is escapes.Refused.ALWAYS or (when is not None and limit is not None)
        sizes = row.sizes or (4, 128)
        if [process.run(escape, row.number, size) for size in sizes] != [refused] * len(sizes):
            differing.add(row.name)
    figure(f"rules_differing_escapes_{'limited' if limit else 'free'}", len(differing))

    assert not differing
