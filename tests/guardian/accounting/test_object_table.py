"""The register: objects come and go with their owners, and the journal tells the same story."""

from __future__ import annotations

import errno
import json
import os
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import AlreadyRunningError
from qgpu.guardian.accounting.object_table import COMPUTE_TSG_BYTES, OTHER_TSG_BYTES, ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.failover.journal import COMPACT_BYTES, Journal
from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.guardian.rules import classes
from qgpu.ipc.codec import grants_to_json
from qgpu.model import Grant, PodClass
from qgpu.nvidia import abi
from tests.guardian.charges import charged
from tests.traces import ARGUMENT, TRACES, allocated, decode, rows

POD = {"fact": "pod", "name": "web", "grants": grants_to_json({0: Grant(PodClass.ONLINE, 30)})}
PROCESS = {"fact": "process", "pid": 100, "pod": "web"}
CLIENT = {"fact": "client", "client": 7, "pid": 100, "fd": 8}


MAP = {"fact": "map", "pid": 100, "uuid": "00" * 16}
UNMAP = {"fact": "unmap", "pid": 100, "uuid": None}


def thing(handle: int, parent: int, rm_class: int, detail: int = 0) -> dict:
    return object_fact(RmObject(7, handle, parent, rm_class, detail))


def confirm(handle: int, context: int = 0) -> dict:
    return {"fact": "confirm", "client": 7, "handle": handle, "context": context}


#: What RM takes for the two TSGs of the tree.
CONTEXT = COMPUTE_TSG_BYTES + OTHER_TSG_BYTES

TREE = [
    POD,
    PROCESS,
    CLIENT,
    thing(2, 7, abi.NV01_DEVICE_0, 0),
    thing(3, 2, abi.KEPLER_CHANNEL_GROUP_A, 1),
    thing(4, 3, 0xC86F),
    thing(5, 2, abi.KEPLER_CHANNEL_GROUP_A, 9),
    thing(6, 2, abi.NV01_MEMORY_LOCAL_USER, 65536),
    confirm(2),
    confirm(3),
    confirm(4, 17),
    confirm(5),
]


def grown(*facts: dict) -> ObjectTable:
    table = ObjectTable()
    for fact in (*TREE, *facts):
        table.note(fact)
    return table


def test_only_confirmed_tsgs_of_the_compute_engine_are_scheduled():
    table = grown(thing(8, 2, abi.KEPLER_CHANNEL_GROUP_A, 1))

    assert [tsg.handle for tsg in table.compute_tsgs(0)] == [3]
    assert [channel.context for channel in table.channels(table.objects[7, 3])] == [17]


@pytest.mark.parametrize("engine", [0x09, 0x12, 0x34, 0x3D, 0x40, 0x53])
def test_tsgs_of_any_copy_engine_are_listed_once_confirmed(engine):
    table = grown(thing(8, 2, abi.KEPLER_CHANNEL_GROUP_A, engine), thing(9, 2, abi.KEPLER_CHANNEL_GROUP_A, engine))
    table.note(confirm(8))

    assert [tsg.handle for tsg in sorted(table.copy_tsgs(0), key=lambda tsg: tsg.handle)] == [5, 8]
    assert [tsg.handle for tsg in table.compute_tsgs(0)] == [3]
    assert table.copy_tsgs(1) == []


@pytest.mark.parametrize("engine", [0, 1, 8, 0x13, 0x33, 0x3E, 0x3F, 0x54])
def test_tsgs_of_other_engines_are_no_copy_tsgs(engine):
    table = grown(thing(8, 2, abi.KEPLER_CHANNEL_GROUP_A, engine), confirm(8))

    assert [tsg.handle for tsg in table.copy_tsgs(0)] == [5]


def test_freeing_a_parent_frees_what_is_below_it():
    table = grown({"fact": "gone", "client": 7, "handle": 2})

    assert table.objects == {}
    assert charged(table, "web") == {}


def test_client_outlives_its_process_until_rm_reports_it_gone():
    table = grown({"fact": "exit", "pid": 100})
    still = charged(table, "web")
    table.note({"fact": "gone", "client": 7, "handle": 7})

    assert still == {0: 65536 + CONTEXT}
    assert (table.clients, table.objects, charged(table, "web")) == ({}, {}, {})


def test_a_client_lives_on_while_another_process_holds_its_file():
    fork = {"fact": "process", "pid": 101, "pod": "web"}
    shared = {"fact": "client", "client": 7, "pid": 101, "fd": 8}
    table = grown(fork, shared, {"fact": "exit", "pid": 100})

    assert table.clients[7].users == [(101, 8)]
    assert len(table.compute_tsgs(0)) == 1


def test_naming_anothers_client_takes_nothing_from_its_owner():
    thief = {"fact": "process", "pid": 200, "pod": "evil"}
    claim = {"fact": "client", "client": 7, "pid": 200, "fd": 3}
    table = grown({**POD, "name": "evil"}, thief, claim)

    assert table.pod_of(table.objects[7, 3]) == "web"


def test_a_compacted_client_is_no_longer_its_former_pods():
    """Another pod's call that named it came during the compaction, before its own fact."""
    table = ObjectTable()
    for fact in (POD, POD | {"name": "former"}, PROCESS | {"pod": "former"}, CLIENT):
        table.note(fact)
    table.note({"fact": "client", "client": 7, "pod": "web", "maker": 200, "made_here": False, "users": []})
    before = table.clients_of("former"), table.clients_of("web"), list(table.used.of(100))
    for fact in ({"fact": "gone", "client": 7, "handle": 7}, {"fact": "exit", "pid": 100}):
        table.note(fact)

    assert before == ([], [7], [])
    assert table.names_in_use() == set()


@pytest.mark.parametrize(("how", "owner"), [({}, "evil"), ({"made_here": True}, "web")], ids=["named", "made here"])
def test_only_a_client_made_again_leaves_the_pod_that_named_it(how, owner):
    table = ObjectTable()
    first = {"fact": "process", "pid": 200, "pod": "evil"}
    claim = {"fact": "client", "client": 7, "pid": 200, "fd": 3}
    for fact in (POD, {**POD, "name": "evil"}, first, claim, PROCESS, CLIENT | how):
        table.note(fact)

    assert (table.clients[7].pod, table.clients[7].made_here) == (owner, bool(how))
    assert table.clients[7].users == [(200, 3) if owner == "evil" else (100, 8)]


def test_memory_adds_up_by_pod_and_card():
    table = grown(thing(9, 2, abi.NV01_MEMORY_LOCAL_USER, 131072))

    assert charged(table, "web") == {0: 3 * 65536 + CONTEXT}


def test_a_devices_subdevice_is_known_until_it_is_freed():
    table = grown(thing(9, 2, abi.NV20_SUBDEVICE_0))
    there = table.subdevice_of((7, 2))
    table.note({"fact": "gone", "client": 7, "handle": 9})

    assert (there, table.subdevice_of((7, 2))) == (9, None)


def test_objects_of_a_class_count_to_the_pod_with_their_client():
    table = grown(POD | {"name": "other"}, *(thing(9 + i, 2, classes.DEBUGGER) for i in range(2)), thing(20, 2, 0x90F1))
    counts = table.others(classes.DEBUGGER).counts
    before = dict(counts)
    table.note({"fact": "owner", "client": 7, "pod": "other", "pid": 200, "fd": 9})
    table.note({"fact": "gone", "client": 7, "handle": 9})

    assert (before, dict(counts), table.others(classes.DEBUGGER).of(7)) == ({"web": 2}, {"other": 1}, {10})
    assert table.others(abi.FERMI_VASPACE_A).of(7) == {20}


def test_a_journal_rebuilds_the_register():
    journal = Journal()
    for fact in TREE:
        journal.append(fact)

    again = ObjectTable()
    for fact in Journal(journal.fd).read()[1]:
        again.note(fact)

    assert again == grown()


def rebuilt(journal):
    again = ObjectTable()
    for fact in Journal(journal.fd).read()[1]:
        again.note(fact)
    return settled(again)


def settled(table):
    """Let all be forgotten that goes bit by bit."""
    while table.allocations.forget_some(1000):
        pass
    table.allocations.discharge_unused()
    return table


def test_a_compacted_journal_rebuilds_the_register():
    journal = Journal()
    for _ in range(200):
        for fact in TREE:
            journal.append(fact)
    journal.compact(grown().facts())
    while journal._compaction:
        journal.append({"fact": "exit", "pid": 100})

    assert rebuilt(journal) == grown({"fact": "exit", "pid": 100})


@pytest.mark.parametrize("seed", range(40))
def test_table_changed_during_compaction_rebuilds_its_last_state(seed):
    random, journal, table = Random(seed), Journal(), ObjectTable()
    follower, follows, anew = ObjectTable(), Journal(journal.fd), []

    def note(fact):
        table.note(fact)
        journal.append(fact)

    def follow():
        began, facts = follows.read()
        anew.append(began)
        for fact in facts:
            follower.note(fact)

    def change():
        handle, other = (random.randrange(10, 60) for _ in range(2))
        match random.randrange(9):
            case 0 | 1 | 2:
                note(
                    thing(handle, 2, abi.NV01_MEMORY_LOCAL_USER, 4096 * handle)
                    | {"memory": table.allocations.next_number()}
                )
                note(confirm(handle))
            case 3:
                note({"fact": "gone", "client": 7, "handle": handle})
            case 4 if (memory := table.allocations.by_handle.get((7, handle))) is not None:
                note(thing(other, 2, abi.NV01_MEMORY_LOCAL_USER, memory.size) | {"memory": memory.number})
            case 5 if (memory := table.allocations.by_handle.get((7, handle))) is not None:
                note({"fact": "pin", "memory": memory.number})
            case 6 if (memory := table.allocations.by_handle.get((7, handle))) is not None:
                note({**MAP, "base": handle << 20, "length": 1 << 21, "memory": memory.number})
            case 7:
                note({**UNMAP, "base": handle << 20, "length": 1 << 20})
            case 8 if random.randrange(20) == 0:
                note({"fact": "ended", "name": "web"})

    for fact in TREE:
        note(fact)
    for _ in range(200):
        change()
    follow()
    journal.compact(table.facts())
    while journal._compaction:
        change()
        note({"fact": "managed", "pid": 100, "bytes": 1})
        if random.randrange(3) == 0:
            follow()
    follow()

    assert rebuilt(journal) == settled(table)
    assert (settled(follower) == table, anew) == (True, [True] + [False] * (len(anew) - 1))


def test_journal_growth_counts_across_short_lived_owners():
    journals, line = [Journal()], {"fact": "gone", "client": 7, "handle": 2, "why": "x" * 1000}
    for _ in range(2):
        list(journals[-1].read()[1])
        assert not journals[-1].should_compact
        for _ in range(COMPACT_BYTES * 7 // 10 // 1000):
            journals[-1].append(line)
        journals.append(Journal(journals[0].fd))
    list(journals[-1].read()[1])

    assert journals[-1].should_compact


def test_answers_alone_make_a_journal_compact_too():
    shared = SharedState(ObjectTable(), Journal(), None, None, None, None, time.monotonic_ns)
    shared.note(POD)
    for call in range(3 * COMPACT_BYTES // 1000):
        shared.record_answer(1, call, [(0, bytes(500))])
    again, facts = Journal(shared.journal.fd), []
    facts += again.read()[1]

    assert os.fstat(shared.journal.fd).st_blocks * 512 <= 2.5 * COMPACT_BYTES
    assert [(fact["fact"], fact["name"]) for fact in facts] == [("pod", "web")]
    assert again.answer_to(1, 3 * COMPACT_BYTES // 1000 - 1) == [(0, bytes(500))]


def test_compaction_ends_as_soon_among_long_answers():
    """A pod repeats a call with the longest answer; the more facts there are, the longer a compaction takes."""
    journal, table, longest = Journal(), grown(*(thing(n, 2, abi.NV20_SUBDEVICE_0) for n in range(100, 1100))), 10_000
    journal.compact(table.facts())
    began = os.fstat(journal.fd).st_size
    while journal._compaction:
        journal.answer(1, 1, [(0, bytes(longest))])

    facts = sum(len(json.dumps(fact)) for fact in table.facts())
    assert os.fstat(journal.fd).st_size - began < 2 * facts + 3 * longest
    assert rebuilt(journal) == table


def test_compaction_without_memory_for_it_loses_nothing(monkeypatch):
    journal, table, write = Journal(), grown(), os.pwrite
    for fact in TREE:
        journal.append(fact)
    journal.compact(table.facts())

    def once(fd, data, at):
        if isinstance(data, bytearray):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", once)
    journal.append({"fact": "exit", "pid": 100})
    monkeypatch.undo()
    journal.append(PROCESS)

    assert not journal._compaction
    assert rebuilt(journal) == grown({"fact": "exit", "pid": 100}, PROCESS)


def test_a_journal_is_written_by_one_process_at_a_time():
    journal = Journal()
    journal.own()
    if (child := os.fork()) == 0:
        try:
            Journal(journal.fd).own()
        except AlreadyRunningError:
            os._exit(0)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("damaged", [b"{", b"{},{}", b'{"fact":}'])
def test_a_damaged_line_costs_no_other_line(damaged):
    journal = Journal()
    journal.append(POD)
    journal._write_lines(damaged + b"\n")
    journal.append({"fact": "ended", "name": "web"})
    facts = list(Journal(journal.fd).read()[1])

    assert [fact["fact"] for fact in facts if "fact" in fact] == ["pod", "ended"]


def test_large_subtrees_are_counted_no_further_than_asked():
    table = ObjectTable()
    for fact in (POD, {"fact": "process", "pid": 1, "pod": "web"}, {"fact": "client", "client": 5, "pid": 1, "fd": 3}):
        table.note(fact)
    table.note(object_fact(RmObject(5, 2, 5, abi.NV01_DEVICE_0, 0)))
    for handle in range(10, 110):
        table.note(object_fact(RmObject(5, handle, 2 if handle < 60 else 10, abi.NV01_MEMORY_LOCAL_USER, 1)))

    assert [table.count_below(key, 20) for key in ((5, 5), (5, 2), (5, 10), (5, 11), (5, 9))] == [21, 21, 21, 1, 0]
    assert [len(list(table.below(key))) for key in ((5, 5), (5, 2), (5, 10))] == [101, 101, 51]


def test_a_line_cut_short_by_a_death_is_left_out():
    journal = Journal()
    journal.append(POD)
    os.pwrite(journal.fd, b'{"fact":"pro', os.fstat(journal.fd).st_size)

    assert list(Journal(journal.fd).read()[1]) == [POD]


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name)
def test_a_recorded_program_leaves_the_objects_rm_says_it_has(trace):
    """And its copies run where its TSGs do: on this card COPY0 and COPY1 share the compute engine's runlist."""
    table = ObjectTable(grces={0: {0x09, 0x0A}})
    table.note(POD)
    table.note(PROCESS)
    kept = {abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, 0x40} | abi.GPFIFO_CLASSES
    for row in rows(trace):
        match decode(row.request, ARGUMENT, row.reader()):
            case rm_calls.Alloc(client=client, rm_class=rm_class) as asked if rm_class in kept:
                table.note({**CLIENT, "client": client, "fd": row.fd})
                detail = rm_calls.detail(rm_class, row.params)
                table.note(object_fact(RmObject(client, asked.handle, asked.parent, rm_class, detail)))
            case rm_calls.Alloc(client=client, parent=channel, rm_class=rm_class) if rm_class in classes.COPIES:
                assert table.is_shared_alike(table.objects[client, channel], rm_calls.detail(rm_class, row.params))
            case rm_calls.Free() as asked:
                table.note({"fact": "gone", "client": asked.client, "handle": asked.handle})

    found = {key: (rm.rm_class, rm.parent) for key, rm in table.objects.items()}
    assert found == {key: what for key, what in allocated(trace).items() if what[0] in kept}


facts = st.sampled_from(
    [
        *TREE,
        {"fact": "exit", "pid": 100},
        {"fact": "gone", "client": 7, "handle": 7},
        {"fact": "gone", "client": 7, "handle": 2},
        {"fact": "gone", "client": 7, "handle": 3},
        {"fact": "timeslice", "client": 7, "handle": 3, "us": 2048},
        {"fact": "pod_retired", "name": "web"},
        {"fact": "process", "pid": 101, "pod": "web"},
        {"fact": "client", "client": 7, "pid": 101, "fd": 8},
    ]
)


@given(st.lists(facts, max_size=40))
def test_facts_in_any_order_rebuild_the_same_object_table(story):
    table = ObjectTable()
    for fact in story:
        table.note(fact)

    again = ObjectTable()
    for fact in table.facts():
        again.note(fact)

    assert again.objects == table.objects
    assert [tsg.key for tsg in again.compute_tsgs(0)] == [tsg.key for tsg in table.compute_tsgs(0)]


NEW = {"fact": "object", "client": 7, "handle": 21, "parent": 2, "class": abi.NV01_MEMORY_LOCAL_USER, "detail": 1 << 30}
WHOSE = {"memory": 77, "pod": "web", "instance": 0, "size": 1 << 30}


@pytest.mark.parametrize(
    "live",
    [
        [NEW | {"memory": 77}, {"fact": "carrier", "carrier": 1} | WHOSE],
        [NEW | {"memory": 77}, {"fact": "pin"} | WHOSE],
        [
            {**POD, "name": "other"},
            {"fact": "process", "pid": 200, "pod": "other"},
            {"fact": "owner", "client": 7, "pod": "other", "pid": 200, "fd": 9},
        ],
    ],
    ids=["carrier", "pin", "owner"],
)
@pytest.mark.parametrize("after", range(12))
def test_a_fact_amid_a_compaction_is_not_lost(live, after):
    table, journal = grown(), []
    for number, fact in enumerate(table.facts()):
        journal.append(fact)
        if number == after:
            for each in live:
                table.note(each)
                journal.append(each)
    again = ObjectTable()
    for fact in journal:
        again.note(fact)

    assert settled(again).allocations.memories == settled(table).allocations.memories


def second(handle: int, same_as: int, parent: int = 2) -> dict:
    return object_fact(RmObject(7, handle, parent, abi.KEPLER_CHANNEL_GROUP_A, 1, same_as=(7, same_as)))


def listed(table: ObjectTable) -> dict[int, set[int]]:
    """Return the channels of each TSG, by the TSG's handle."""
    return {tsg.handle: {channel.handle for channel in table.channels(tsg)} for tsg in table.compute_tsgs(0)}


def test_process_that_ends_after_its_pod_is_not_remembered():
    table = ObjectTable()
    for fact in (POD, PROCESS, {"fact": "pod_retired", "name": "web"}, {"fact": "exit", "pid": 100}):
        table.note(fact)

    assert table.ended_processes.pod_of(100) is None


@pytest.mark.parametrize("moved", [False, True], ids=["gone", "moved, then gone"])
def test_nothing_counts_for_a_pod_whose_clients_are_gone(moved):
    """Pods come and go by the thousand."""
    table = grown({"fact": "shared", "client": 7, "handle": 6, "there": True})
    if moved:
        table.note({"fact": "owner", "client": 7, "pod": "other", "pid": 100, "fd": 5})
    kinds = (table.handles, table.devices, table.tsg_handles, table.channel_handles, table.shared_with_all)
    before = [dict(kind.counts) for kind in kinds]
    table.note({"fact": "gone", "client": 7, "handle": 7})

    assert before == [{"other" if moved else "web": count} for count in (5, 1, 2, 1, 1)]
    assert [dict(kind.counts) for kind in kinds] == [{}] * 5


def test_a_tsg_with_two_handles_is_listed_once_with_all_channels():
    table = grown(second(20, 3), confirm(20), thing(21, 20, 0xC86F), confirm(21))

    assert listed(table) == {3: {4, 21}}


def test_the_second_handle_takes_the_place_of_a_freed_first():
    table = grown(second(20, 3), confirm(20), second(30, 20), confirm(30), thing(31, 30, 0xC86F), confirm(31))
    table.note({"fact": "gone", "client": 7, "handle": 3})

    assert listed(table) == {20: {31}}


def test_a_handle_whose_client_changes_pods_is_a_tsg_of_its_own():
    heir = [{**POD, "name": "heir"}, {"fact": "process", "pid": 300, "pod": "heir"}]
    other = {"fact": "client", "client": 8, "pid": 100, "fd": 9}
    device = object_fact(RmObject(8, 2, 8, abi.NV01_DEVICE_0, 0))
    further = object_fact(RmObject(8, 20, 2, abi.KEPLER_CHANNEL_GROUP_A, 1, same_as=(7, 3)))
    channel = object_fact(RmObject(8, 21, 20, 0xC86F))
    sure = [{**confirm(handle), "client": 8} for handle in (2, 20, 21)]
    table = grown(*heir, other, device, further, channel, *sure)
    assert listed(table) == {3: {4, 21}}

    table.note({"fact": "owner", "client": 8, "pod": "heir", "pid": 300, "fd": 4})
    assert listed(table) == {3: {4}, 20: {21}}
    assert table.pod_of(table.objects[8, 20]) == "heir"


@given(
    st.lists(
        st.tuples(st.sampled_from(["share", "channel", "free"]), st.integers(0, 9), st.integers(0, 9)), max_size=30
    )
)
def test_every_channel_of_a_shared_tsg_is_listed_exactly_once(steps):
    table = grown()
    for what, which, from_ in steps:
        tsgs = [handle for handle in (3, *range(20, 30)) if (7, handle) in table.objects]
        source = tsgs[from_ % len(tsgs)] if tsgs else 3
        if what == "share" and tsgs and 20 + which not in tsgs:
            facts = [second(20 + which, source), confirm(20 + which)]
        elif what == "channel" and tsgs:
            facts = [thing(100 + 10 * which + from_, source, 0xC86F), confirm(100 + 10 * which + from_)]
        else:
            facts = [{"fact": "gone", "client": 7, "handle": source}]
        for fact in facts:
            table.note(fact)

    channels = {rm.handle for rm in table.objects.values() if rm.rm_class == 0xC86F}
    shown = listed(table)
    assert sorted(handle for each in shown.values() for handle in each) == sorted(channels)
    again = ObjectTable()
    for fact in table.facts():
        again.note(fact)
    assert listed(again) == shown


@pytest.mark.parametrize(
    "fact",
    [
        {"fact": "untracked", "client": 7},
        {"fact": "untracked", "client": 7, "system": True},
        {"fact": "shared", "client": 7},
        {"fact": "event", "pod": "web", "kind": "os", "client": 7},
    ],
    ids=["untracked", "system memory", "shared", "event"],
)
def test_a_compaction_tells_nothing_that_is_over_meanwhile(fact):
    table = ObjectTable()
    number = "number" if fact["fact"] == "event" else "handle"
    for each in (POD, PROCESS, CLIENT, *(fact | {number: at, "there": True} for at in range(1, 9))):
        table.note(each)
    told = []
    for each in table.facts():
        told.append(each)
        if each["fact"] == fact["fact"]:
            for at in range(1, 9):
                table.note(fact | {number: at, "there": False})

    assert [each["fact"] for each in told].count(fact["fact"]) == 1


def test_a_compaction_tells_the_latest_count_of_unnamed_objects():
    table = ObjectTable()
    for each in (POD, PROCESS, CLIENT, {"fact": "unnamed", "pod": "web", "count": 1}):
        table.note(each)
    facts = table.facts()
    told = [next(facts)]
    table.note({"fact": "unnamed", "pod": "web", "count": 5})
    told += facts

    assert [each["count"] for each in told if each["fact"] == "unnamed"] == [5]
