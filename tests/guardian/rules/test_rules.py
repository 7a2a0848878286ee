"""The tables of controls, classes and escapes: whole, right in themselves, and right beside the drivers' own."""

from __future__ import annotations

import re
import struct
from collections import Counter
from pathlib import Path

import pytest

from qgpu.guardian.proxy import control_calls, rm_calls
from qgpu.guardian.proxy.client_registry import ClientRegistry
from qgpu.guardian.rules import allowed_controls, classes, controls, escapes, refused_controls, rows
from qgpu.nvidia import abi, versions
from tests import rm_data
from tests.traces import ARGUMENT, RECORDINGS, TOOLS, decode
from tests.traces import rows as calls_of

#: Names that begin with no class's number.
_WORDS = {"NV_SEMAPHORE_SURFACE": {0xDA}, "NV_EVENT_BUFFER": {0x90CD}, "NV_COUNTER_COLLECTION_UNIT": {0xCBCA}}
_WORDS |= {"NV_CONF_COMPUTE": {0xCB33, 0xC56F}, "NV_CTRL": {0x83DE}}


def by_trace(path):
    return path.name.split(".")[-3].rpartition("-")[2]


def _places(places, size):
    return {place[:3] for place in places if place.size in (None, size) and place.at + 4 <= size}


def asked_in(trace):
    for row in calls_of(trace):
        yield row, decode(row.request, ARGUMENT, row.reader())


@pytest.mark.parametrize("table", [controls.ROWS, classes.ROWS, escapes.ROWS], ids=["controls", "classes", "escapes"])
def test_a_table_has_one_row_a_number(table):
    numbers = [row.number for row in table]

    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("table", [allowed_controls, refused_controls, classes], ids=["allowed", "refused", "classes"])
def test_a_file_has_its_rows_in_order(table):
    numbers = [row.number for row in table.ROWS]

    assert numbers == sorted(numbers)


@pytest.mark.parametrize("table", [controls.ROWS, classes.ROWS, escapes.ROWS], ids=["controls", "classes", "escapes"])
def test_a_name_is_that_of_one_row(table):
    names = Counter(row.name for row in table if row.name)

    assert [name for name, times in names.items() if times > 1] == []


def test_each_control_is_in_its_file():
    """SET_TIMESLICE is refused beside those that are allowed, because the plan answers it."""
    allowed = {row.number for row in allowed_controls.ROWS}

    assert allowed == controls.ALLOWED_TO_SOME.keys() | {abi.NVA06C_SET_TIMESLICE}


def test_a_client_that_rm_looks_a_handle_up_in_is_known():
    """It is in the same parameters, and must be the pod's own."""
    for row in (*controls.ROWS, *classes.ROWS):
        named = {place.size for place in row.handles if place.scope is rows.Scope.NAMED}
        assert named <= {place.size for place in row.clients}, row.name


def test_only_controls_for_firmware_have_no_name():
    assert all(row.firmware is (row.module is rows.InModule.FIRMWARE) for row in controls.ROWS)
    assert all(row.name for row in classes.ROWS)


def test_a_controls_name_begins_with_its_class():
    for row in controls.ROWS:
        if row.name.startswith("NV"):
            number = re.match(r"NV([0-9A-F]{4})_", row.name)
            word = next((uppers for word, uppers in _WORDS.items() if row.name.startswith(word)), set())
            assert row.number >> 16 in ({int(number[1], 16)} if number else word), row.name


def test_what_is_refused_has_nothing_to_be_carried_out_by():
    bare = ("clients", "handles", "pointers", "descriptor_at", "unregisters", "firmware")

    for row in controls.ROWS:
        allowed = row.number in controls.ALLOWED_TO_SOME
        assert allowed or not any(getattr(row, field) for field in bare), row.name


def test_plain_controls_are_allowed_and_unremarkable():
    assert controls.ALLOWED.keys() > controls.PLAIN
    for number in controls.PLAIN:
        row = controls.ALLOWED[number]
        assert (row.clients, row.pointers, row.descriptor_at, row.module) == ((), (), None, None)


def test_a_control_that_the_handler_knows_is_not_plain():
    """It would take the fast path, past the handler."""
    source = Path(control_calls.__file__).read_text()
    named = {getattr(abi, name) for name in re.findall(r"abi\.(NV[0-9A-F]{4}_\w+)", source)}

    assert named & controls.ALLOWED.keys()
    assert not named & controls.PLAIN


@pytest.mark.parametrize("trace", RECORDINGS, ids=by_trace)
def test_what_a_recorded_program_asks_is_allowed(trace):
    """Or refused as it always was: a timeslice of one's own, and what the kernel carries out itself."""
    for row, asked in asked_in(trace):
        if isinstance(asked, rm_calls.Control) and int.from_bytes(row.after[asked.status_at :][:4], "little"):
            continue  # RM refused it too
        match asked:
            case rm_calls.Control(command=abi.NVA06C_SET_TIMESLICE):
                assert controls.refusal(asked.command) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            case rm_calls.Control():
                assert asked.command in controls.ALLOWED, controls.name(asked.command)
            case rm_calls.AllocMemory() if asked.rm_class not in classes.ALLOWED:
                known = classes.CLASSES[asked.rm_class]
                assert known.empty_by_alloc_memory or known.why is classes.KERNEL, known.name
            case rm_calls.Alloc() if asked.rm_class not in classes.ALLOWED:
                known = classes.CLASSES[asked.rm_class]
                assert known.why in (classes.KERNEL, classes.GRAPHICS), known.name


def test_only_what_profilers_ask_for_needs_the_grant():
    """ncu needs it and compute-sanitizer does not; what cuda-gdb does to memory is refused either way."""
    refused = {}
    for trace in TOOLS:
        tool = trace.name.removesuffix(".jsonl.xz").partition("04-")[2]
        numbers = {each.command for _, each in asked_in(trace) if isinstance(each, rm_calls.Control)}
        numbers |= {each.rm_class for _, each in asked_in(trace) if isinstance(each, rm_calls.Alloc)}
        rows_of = [controls.CONTROLS.get(number) or classes.CLASSES[number] for number in numbers]
        refused[tool] = {row.why for row in rows_of if not row.why.allowed and row.why is not classes.KERNEL}

    scheduling = {rows.Why.SCHEDULING}
    assert refused["compute-sanitizer"] == {rows.Why.PROFILING} | scheduling
    assert refused["nsight-compute"] == {rows.Why.PROFILING, rows.Why.ACTS} | scheduling
    assert refused["cuda-gdb"] == {rows.Why.MEMORY, rows.Why.PROFILING} | scheduling


@pytest.mark.parametrize("trace", RECORDINGS, ids=by_trace)
def test_a_recorded_program_names_its_own_clients(trace):
    """It would be refused otherwise."""
    for row, asked in asked_in(trace):
        match asked:
            case rm_calls.Control() if asked.command in controls.ALLOWED:
                places = controls.ALLOWED[asked.command].clients
            case rm_calls.Alloc() if asked.rm_class in classes.ALLOWED and asked.params:
                places = classes.ALLOWED[asked.rm_class].clients
            case _:
                continue
        assert set(rows.handles(places, row.params)) <= {0, asked.client}


def test_what_is_seen_was_seen():
    asked = [asked for trace in RECORDINGS for _, asked in asked_in(trace)]
    commands = {each.command for each in asked if isinstance(each, rm_calls.Control)}
    made = {each.rm_class for each in asked if isinstance(each, rm_calls.Alloc)}

    assert {row.number for row in controls.ROWS if row.why is rows.Why.SEEN} == commands & controls.ALLOWED.keys()
    assert {row.number for row in classes.ROWS if row.why is classes.SEEN} == made & classes.ALLOWED.keys()


def test_every_known_branch_is_recorded():
    assert {branch.major for branch in versions.BRANCHES} == {
        int(driver.partition(".")[0]) for driver in rm_data.DRIVERS
    }


@pytest.mark.parametrize("driver", rm_data.DRIVERS)
@pytest.mark.parametrize(
    ("table", "read"),
    [(controls.CONTROLS, rm_data.controls), (classes.CLASSES, rm_data.classes)],
    ids=["controls", "classes"],
)
def test_whatever_a_driver_lets_anybody_ask_has_a_row(driver, table, read):
    assert [(hex(each.number), each.name) for each in read(driver) if each.number not in table] == []


@pytest.mark.parametrize(
    ("table", "read"),
    [(controls.CONTROLS, rm_data.controls), (classes.CLASSES, rm_data.classes)],
    ids=["controls", "classes"],
)
def test_a_row_has_the_newest_drivers_name(table, read):
    newest = {each.number: each.name for driver in rm_data.DRIVERS for each in read(driver)}

    for number, name in newest.items():
        assert table[number].name.partition(" (")[0] == name


@pytest.mark.parametrize("driver", rm_data.DRIVERS)
def test_rows_know_every_handle_in_a_controls_parameters(driver):
    for each in rm_data.controls(driver):
        if (row := controls.ALLOWED_TO_SOME.get(each.number)) is not None:
            assert _places(row.clients, each.size) == each.clients, row.name
            assert _places(row.handles, each.size) == each.handles, row.name


@pytest.mark.parametrize("driver", rm_data.DRIVERS)
def test_rows_know_every_pointer_in_a_controls_parameters(driver):
    """But for those that RM writes."""
    for each in rm_data.controls(driver):
        row = controls.ALLOWED_TO_SOME.get(each.number)
        if row is not None and row.number != abi.NV2080_PERF_GET_UTIL_SAMPLES:
            assert {pointer.at for pointer in row.pointers} == each.pointers, row.name


@pytest.mark.parametrize("driver", rm_data.DRIVERS)
def test_rows_know_handles_and_pointers_of_a_class(driver):
    for each in rm_data.classes(driver):
        if (row := classes.ALLOWED_TO_SOME.get(each.number)) is not None:
            assert _places(row.clients, each.size) == each.clients, row.name
            assert _places(row.handles, each.size) == each.handles, row.name
            assert {place.at for place in row.addresses} >= each.pointers, row.name


def test_a_channel_that_nobody_gates_is_not_allowed():
    channels = {number for number in classes.ALLOWED if number & 0xFF == 0x6F}

    assert channels == abi.GPFIFO_CLASSES


def test_scheduling_is_a_right_and_the_rest_is_unknown():
    assert controls.refusal(abi.NV2080_FIFO_DISABLE_CHANNELS) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert controls.refusal(0x0080180A) == controls.refusal(0x2080FFF1) == abi.NV_ERR_NOT_SUPPORTED


def test_classes_of_memory_by_its_place_are_not_for_pods():
    for rm_class in (abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, 0x81, *classes.PHYSICAL, 0xC57D, 0x9010):
        assert rm_class not in classes.ALLOWED, hex(rm_class)


def test_the_old_call_makes_what_the_table_says(on_card):
    refused = set()
    for number in classes.CLASSES:
        memory = struct.pack("<6IQQIIiI", 7, 2, 0x900, number, 0, 0, 0, 0, 0xFFFF, 0, -1, 0)
        answer = on_card.call(abi.NV_ESC_RM_ALLOC_MEMORY, memory)[2]
        if struct.unpack_from("<I", answer, 40)[0] == abi.NV_ERR_INVALID_CLASS:
            refused.add(number)

    made = {row.number for row in classes.ROWS if row.by_alloc_memory or row.empty_by_alloc_memory}
    assert classes.CLASSES.keys() - refused == made


class _Owners:
    def owns(self, pod, client):
        return (pod, client) == ("web", 9)


@pytest.mark.parametrize(("client", "refused"), [(0, False), (7, False), (9, False), (8, True)])
def test_a_client_in_any_place_is_looked_at(client, refused):
    params = bytes(12) + client.to_bytes(4, "little") + bytes(4)

    assert ClientRegistry.names_others(_Owners(), "web", 7, (rows.Handle(4, 2, 8),), params) is refused


def test_a_place_counts_in_parameters_of_its_size():
    place = rows.Handle(0, size=24)

    assert list(rows.handles([place], bytes(24))) == [0]
    assert list(rows.handles([place], bytes(40))) == []


def test_places_beyond_the_parameters_name_nothing():
    assert list(rows.handles((rows.Handle(0, 4), rows.Handle(40)), bytes(10))) == [0, 0]
