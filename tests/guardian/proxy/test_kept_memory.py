"""Memory whose handle or process has gone counts for as long as anything may keep it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import threading
import time

import pytest

from qgpu.guardian.accounting import memory_quota
from qgpu.guardian.accounting.allocations import Allocations
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy import held_uvm_files, passthrough, uvm_calls
from qgpu.linux import proc
from qgpu.linux.inflight_syscalls import InflightSyscall, InflightSyscalls
from qgpu.linux.seccomp_notify import Listener
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import alloc, free, uvm_mapping, uvm_mapping_status, uvm_range
from tests.guardian.charges import charged
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import LIMIT, MAJOR, MOST, PATIENCE_S, allocate, held, until
from tests.guardian.proxy.test_memory import someone_elses


@pytest.fixture
def mapped(on_card):
    """A pod with memory under handle 10, which is mapped where nobody told the guardian of."""
    allocate(on_card, 10, MOST)
    on_card.rm.mapped.add((7, 10))
    return on_card


@pytest.fixture
def told(mapped):
    """The same, where the mapping was told of."""
    mapped.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 10))
    return mapped


@pytest.fixture
def carrier():
    """A file that can carry memory, and what closes it."""
    ends = os.pipe()
    left = list(ends)

    def close():
        while left:
            os.close(left.pop())

    yield ends[0], close
    close()


@pytest.fixture
def exported(on_card, carrier):
    """A pod with memory under handle 10, of which there is a descriptor."""
    allocate(on_card, 10, MOST)
    on_card.shared.quota.export(7, [10], carrier[0])
    return on_card


class Endless(InflightSyscalls):
    """Calls in progress that do not end."""

    def wait(self, patience_s):
        return False


def look(pod):
    """Look which carriers are closed, and return what the pod is charged then."""
    pod.shared.quota.carriers_closed(pod.shared.quota.closed_carriers())
    return memory(pod)


def free_10(pod):
    pod.call(abi.NV_ESC_RM_FREE, free(10))


def memory(pod):
    """Return what a pod is charged for memory alone, without page tables."""
    pod.shared.table.allocations.forget_some(1000)
    return charged(pod.shared.table, "web").get(0, 0)


def kept_by_a_sleeper(pod):
    """End the process that is known of, then all; return what is charged in between and after.

    In between a child that never made a call may have its files.
    """
    pod.shared.exited(pod.process.pid)
    pod.settle()
    between = memory(pod)
    pod.shared.listener_closed(pod.number)
    pod.shared.note({"fact": "gone", "client": 7, "handle": 7})
    return between, memory(pod)


def test_memory_freed_while_mapped_is_charged_until_unmapped(told):
    free_10(told)
    before = memory(told)
    told.rm.unmaps = True
    told.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 40, PAGE))

    assert (before, memory(told)) == (MOST, 0)
    assert not told.rm.sizes.keys() & told.rm.objects.keys()


def test_a_pod_cannot_free_the_handle_that_keeps_what_is_mapped(told):
    free_10(told)
    (ours,) = (handle for client, handle in told.rm.sizes.keys() & told.rm.objects.keys())
    answer = told.call(abi.NV_ESC_RM_FREE, free(ours))[2]

    assert struct.unpack_from("<I", answer, 12)[0] == abi.NV_ERR_OBJECT_NOT_FOUND
    assert (7, ours) in told.rm.objects
    assert memory(told) == MOST


def test_mappings_in_a_range_are_looked_at_without_the_lock(told, monkeypatch):
    """A process can have very many, and UVM refuses to unmap such a range: a pod can ask for ever."""
    owned, among = [], Allocations.among

    def looked(*arguments):
        owned.append(told.shared.lock._is_owned())
        return among(*arguments)

    monkeypatch.setattr(Allocations, "among", looked)
    told.uvm(uvm.UNMAP_EXTERNAL, uvm_range(0, 1 << 63))

    assert owned == [False]


def test_memory_without_a_handle_left_for_it_stays_charged(told):
    """A pod may use up the handles that are kept for this, by its own or by much that it frees while it is mapped."""
    objects = told.shared.table.objects
    objects.update({(7, 0x6FFF0000 + number): objects[7, 10] for number in range(0x10000)})
    free_10(told)

    assert memory(told) == MOST


def test_what_is_freed_beside_a_mapping_in_the_making_counts_on(on_card):
    """It may be mapped by that, and what RM shows to be free may be another's."""
    allocate(on_card, 10, MOST)
    on_card.dispatcher._ctx.uvm_mappings = Endless()
    free_10(on_card)

    assert memory(on_card) == MOST


def test_unmap_beside_mapping_in_flight_stays_charged(told):
    free_10(told)
    told.rm.unmaps = True
    told.dispatcher._ctx.uvm_mappings = Endless()
    told.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 40, PAGE))

    assert memory(told) == MOST


#: Of a mapping that nothing else is near.
TABLES = 16 << 10


def test_page_tables_of_what_is_mapped_count_and_must_fit(on_card):
    """The same memory mapped here and there costs no memory, but tables for each place."""
    allocate(on_card, 10, PAGE)
    on_card.limits[0] = PAGE + 3 * TABLES
    answers = [on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(at << 29, PAGE, 10))[2] for at in range(1, 6)]
    full = held(on_card)
    on_card.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 29, PAGE))
    again = on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(6 << 29, PAGE, 10))[2]

    said = [uvm_mapping_status(answer) for answer in (*answers, again)]
    assert said == [0xFFFF] * 3 + [abi.NV_ERR_NO_MEMORY] * 2 + [0xFFFF]
    assert (full, held(on_card)) == (PAGE + 3 * TABLES, PAGE + 3 * TABLES)


def test_unmap_of_something_else_gives_nothing_back(told):
    free_10(told)
    told.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 40, PAGE))  # RM says that it is still mapped

    assert memory(told) == MOST
    told.rm._free(7, 7)
    assert kept_by_a_sleeper(told)[1] == 0


def test_unreported_mapping_stays_charged_until_pod_ends(mapped):
    free_10(mapped)

    assert kept_by_a_sleeper(mapped) == (MOST, 0)


def test_export_charged_while_silent_process_may_hold_descriptor(exported):
    free_10(exported)

    assert kept_by_a_sleeper(exported) == (MOST, MOST)


def test_exported_memory_outlives_its_pod_charged(exported, carrier):
    free_10(exported)
    kept_by_a_sleeper(exported)
    open_still = look(exported)
    carrier[1]()

    assert (open_still, look(exported)) == (MOST, 0)


def test_a_message_in_flight_keeps_exported_memory_charged(exported, carrier):
    free_10(exported)
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], [carrier[0]])
    carrier[1]()
    in_flight = look(exported)
    ours.close()
    theirs.close()

    assert (in_flight, look(exported)) == (MOST, 0)


def test_a_closed_carrier_leaves_memory_with_a_handle_charged(exported, carrier):
    carrier[1]()

    assert look(exported) == MOST


def test_a_successor_sees_carriers_of_its_predecessor_close(exported, carrier):
    free_10(exported)
    successor = exported.fresh(Journal(os.dup(exported.shared.journal.fd)))
    for fact in successor.journal.read()[1]:
        successor.table.note(fact)
    exported.shared = successor
    open_still = look(exported)
    carrier[1]()

    assert (open_still, look(exported)) == (MOST, 0)


def test_a_file_carries_so_many_exports_and_no_more(exported, carrier):
    for handle in range(11, 18):
        allocate(exported, handle, PAGE)
        exported.shared.quota.export(7, [handle], carrier[0])
    allocate(exported, 20, PAGE)

    with pytest.raises(OSError, match="too many exports"):
        exported.shared.quota.export(7, [20], carrier[0])


def test_a_second_export_to_one_file_outlives_its_pod_too(exported, carrier):
    allocate(exported, 11, PAGE)
    exported.shared.quota.export(7, [11], carrier[0])
    free_10(exported)
    exported.call(abi.NV_ESC_RM_FREE, free(11))
    kept_by_a_sleeper(exported)
    open_still = look(exported)
    carrier[1]()

    assert (open_still, look(exported)) == (MOST + PAGE, 0)


def test_exports_count_to_whose_memory_it_is(exported, monkeypatch):
    """A pod that has another's file exports that one's memory; all pods' exports have a bound."""
    monkeypatch.setattr(memory_quota, "_MOST_CARRIED", 3)
    files = [end for _ in range(2) for end in os.pipe()]
    for file in files[:2]:
        exported.shared.quota.export(7, [10], file)

    with pytest.raises(OSError, match="too many open exports"):
        exported.shared.quota.export(7, [10], files[2])
    for file in files:
        os.close(file)


def test_memory_exported_while_it_is_made_counts_whole(on_card, carrier):
    """Its true size is known only once RM has made it, and a file may carry it by then."""
    on_card.rm.made = lambda key: on_card.shared.quota.export(key[0], [key[1]], carrier[0])
    allocate(on_card, 10, 1)
    on_card.shared.quota.pin_handles(7, [10])

    assert (held(on_card), memory(on_card)) == (PAGE, PAGE)
    on_card.shared.table.allocations.pod_ended("web")
    free_10(on_card)
    assert memory(on_card) == PAGE
    carrier[1]()
    look(on_card)
    on_card.shared.note({"fact": "gone", "client": 7, "handle": 7})
    assert memory(on_card) == 0


def test_a_compacted_journal_knows_carriers_and_ended_pods(exported):
    free_10(exported)
    kept_by_a_sleeper(exported)
    again = ObjectTable()
    for fact in exported.shared.table.facts():
        again.note(fact)
    for mark in exported.shared.table.allocations.carriers():
        again.note({"fact": "carrier_closed", "carrier": mark})

    assert charged(again, "web") == {}


def test_a_pod_with_another_filter_has_not_ended_with_the_first(exported):
    free_10(exported)
    exported.shared.listeners.add("web", os.dup(exported.listener))

    assert kept_by_a_sleeper(exported) == (MOST, MOST)


def test_kept_memory_survives_closing_of_another_file(mapped):
    mapped.rm.objects[8, 8] = (abi.NV01_ROOT_CLIENT, 0)
    mapped.shared.note({"fact": "client", "client": 8, "pid": mapped.process.pid, "fd": 99})
    mapped.rm._make(8, 1, abi.NV01_MEMORY_LOCAL_USER, 8, MOST)
    mapped.rm.meanwhile = lambda: mapped.rm._free(8, 8)  # its file is closed while the memory is freed
    free_10(mapped)

    assert held(mapped) == MOST


def test_unreported_mapping_charged_until_uvm_file_is_closed(on_card):
    allocate(on_card, 10, MOST)
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    on_card.rm._free(7, 7)  # what was mapped stays with UVM, which has a name of its own for it
    on_card.shared.reconciler.recheck([(7, 7)])
    on_card.settle()
    kept = held(on_card)
    files = on_card.shared.uvm_files
    files.release(files.take(on_card.process.pid))  # as when another program is executed, which closes both
    on_card.shared.pod_uvm_files.released(on_card.process.pid, [])

    assert (kept, held(on_card)) == (MOST, 0)


def test_memory_of_another_pods_client_is_mapped_by_no_claim(on_card):
    someone_elses(on_card, 9)
    answer = on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 10, client=9))[2]

    assert uvm_mapping_status(answer) == abi.NV_ERR_NO_MEMORY


def test_a_file_that_a_mapping_names_no_card_of_is_emptied_too(on_card):
    """Another process has registered the card on it, and the pod can change the mapping's cards after the check."""
    allocate(on_card, 10, MOST)
    nameless = bytearray(uvm_mapping(1 << 40, PAGE, 10))
    nameless[24:40] = b"\x01" * 16
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, bytes(nameless))
    (file,) = on_card.shared.uvm_files.take(on_card.process.pid)
    on_card.shared.uvm_files.release([file])

    assert file.cards == set(on_card.shared.uuids)


def test_exec_releases_old_memory_when_program_registers_card(on_card, monkeypatch):
    """Executing another program closes UVM's file and the clients'; the new one has a file of UVM's soon."""
    allocate(on_card, 10, MOST)
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 10))
    monkeypatch.setattr(held_uvm_files, "_has", lambda pid, held: False)
    on_card.rm._free(7, 7)
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))

    assert held(on_card) == 0


def test_mapped_memory_stays_charged_when_its_device_is_freed(mapped):
    mapped.call(abi.NV_ESC_RM_FREE, free(2))

    assert memory(mapped) == MOST


def test_a_process_that_dies_gives_back_what_rm_says_is_gone(on_card):
    allocate(on_card, 10, MOST)
    on_card.shared.exited(on_card.process.pid)
    on_card.rm._free(7, 7)
    before = held(on_card)
    on_card.settle()

    assert (before, held(on_card)) == (MOST, 0)


def test_exit_frees_no_memory_that_another_process_holds(on_card):
    allocate(on_card, 10, MOST)
    on_card.shared.exited(on_card.process.pid)
    on_card.settle()

    assert held(on_card) == MOST


def test_asking_rm_about_a_pods_clients_takes_a_tenth_of_time(on_card):
    """Nobody else is served meanwhile, and a pod can have as many clients as it likes and be refused as often."""
    now, asked = [0], []
    on_card.shared.clock = lambda: now[0]

    def slow(key):
        asked.append(now[0])
        now[0] += 1000
        return True

    on_card.shared.gpu_ops.exists = slow
    for _ in range(500):
        now[0] += 100
        on_card.shared.quota.fits("web", [0], 2 * LIMIT)

    assert len(asked) * 1000 <= now[0] // 8
    assert len(asked) > 1


def test_rm_is_asked_about_a_pods_clients_without_the_lock(on_card):
    """A pod can have thousands of clients, and be refused memory as often as it likes."""
    shared, free = on_card.shared, []

    def exists(key):
        def take():
            free.append(shared.lock.acquire(timeout=1))
            if free[-1]:
                shared.lock.release()

        taker = threading.Thread(target=take)
        taker.start()
        taker.join()
        return True

    allocate(on_card, 10, MOST)
    shared.gpu_ops.exists = exists
    refused = allocate(on_card, 11, MOST)
    shared.clients.forget_previous_program("web", on_card.process.pid)

    assert refused == abi.NV_ERR_NO_MEMORY
    assert free == [True, True]


def test_client_that_rm_makes_anew_meanwhile_is_kept(on_card):
    """RM can give a handle out again between its answer and what follows from it."""
    answers = [False, True]
    allocate(on_card, 10, PAGE)
    on_card.shared.gpu_ops.exists = lambda key: answers.pop(0)
    on_card.shared.clients.forget_previous_program("web", on_card.process.pid)

    assert held(on_card) == PAGE


def test_vaspace_free_asks_rm_independently_of_memory_count(on_card):
    for handle in range(10, 30):
        allocate(on_card, handle, PAGE)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(40, 2, abi.FERMI_VASPACE_A), bytes(64))
    on_card.call(abi.NV_ESC_RM_FREE, free(40))
    asked = []
    on_card.shared.gpu_ops.exists = lambda key: asked.append(key) or True
    on_card.settle()

    assert asked
    assert not [key for key in asked if 10 <= key[1] < 30]


@pytest.fixture
def beside_another(on_card):
    """A pod's process beside another one of it that has a UVM file."""
    other = subprocess.Popen(["sleep", "60"])
    on_card.shared.clients.register_process("web", other.pid)
    with open(os.devnull, "r+b", buffering=0) as its_uvm_file:
        on_card.shared.pod_uvm_files.hold(other.pid, 5, its_uvm_file.fileno())
    yield on_card
    on_card.shared.uvm_files.release(on_card.shared.uvm_files.take(other.pid))
    other.kill()
    other.wait()


def test_a_mapping_stays_on_the_uvm_file_that_was_checked(beside_another, tmp_path, monkeypatch):
    """Another process's file would keep the memory when the process that maps it has ended."""
    pod, flag, proceed = beside_another, tmp_path / "exchange", Listener.proceed

    def proceed_late(listener, number):
        flag.touch()
        deadline = time.monotonic() + 1
        while flag.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        return proceed(listener, number)

    allocate(pod, 10, MOST)
    monkeypatch.setattr(Listener, "proceed", proceed_late)
    pod.shared.major, pod.shared.uvm_major = None, MAJOR
    asked = uvm_mapping(1 << 40, PAGE, 10)
    pod.tell(f"exchange_while {uvm.MAP_EXTERNAL_ALLOCATION} {asked.hex()} {flag}")

    assert pod.answer()[1] == errno.EINVAL  # by /dev/random, not by /dev/null


@pytest.fixture
def followed(monkeypatch):
    """Record when the kernel begins and ends a call on a checked file; it lasts until ``followed.over`` is set."""

    class Followed(list):
        over = threading.Event()

    order = Followed()

    def follow(call):
        order.append("begun")
        order.over.wait(PATIENCE_S)
        order.append("over")

    order.over.clear()
    monkeypatch.setattr(InflightSyscall, "wait", follow)
    return order


def maps(pod, handle):
    pod.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, handle))


def test_calls_are_served_while_kernel_maps_on_a_checked_file(beside_another, followed):
    """But the process's next one that stops its threads waits for the end of the first."""
    maps(beside_another, 10)
    until(lambda: followed == ["begun"])
    allocate(beside_another, 12, PAGE)
    assert followed == ["begun"]

    threading.Timer(0.1, followed.over.set).start()
    maps(beside_another, 11)
    until(lambda: followed == ["begun", "over"] * 2)


def test_pod_with_many_calls_in_the_kernel_waits_for_the_next(beside_another, followed, monkeypatch):
    monkeypatch.setattr(passthrough, "_MOST_FOLLOWING", 0)
    threading.Timer(0.1, followed.over.set).start()
    maps(beside_another, 10)

    assert followed == ["begun", "over"]


def test_registration_on_a_checked_file_is_in_progress(beside_another, followed):
    beside_another.uvm(uvm.REGISTER_CHANNEL, bytes(56))
    registering = beside_another.dispatcher._ctx.registering

    assert list(registering.calls) == [beside_another.process.pid]
    followed.over.set()


@pytest.mark.parametrize(
    ("request_", "argument"),
    [
        (uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 10)),
        (uvm.REGISTER_GPU_VASPACE, bytes(32)),
        (uvm.REGISTER_CHANNEL, bytes(56)),
    ],
    ids=["mapping", "address space", "channel"],
)
def test_uvm_gets_no_file_of_a_threads_own_table(on_card, request_, argument):
    """The guardian looks at the file in the process's table; what UVM keeps in another process's outlives this one."""
    allocate(on_card, 10, MOST)
    on_card.shared.major, on_card.shared.uvm_major = None, MAJOR
    on_card.tell(f"own_table {request_} {argument.hex()}")
    code = on_card.answer()[1]

    assert code != errno.ENOTTY  # as /dev/null answers
    assert on_card.shared.refusals.counts["web", "call while other threads run"] == 1


def test_a_first_uvm_file_waits_for_mappings_in_progress(on_card, monkeypatch):
    """They were allowed while no other process had a file; their threads may be late in the kernel."""
    monkeypatch.setattr(uvm_calls, "_FILE_PATIENCE_S", 0.01)
    process = subprocess.Popen(["sleep", "1000"])
    until(lambda: "nanosleep" in proc.wchan(process.pid, process.pid))
    call = InflightSyscall(process.pid, process.pid, proc.syscall(process.pid, process.pid))
    on_card.dispatcher._ctx.uvm_mappings.calls[process.pid] = call
    before = on_card.uvm(uvm.REGISTER_GPU, bytes(40))[2]
    process.kill()
    process.wait()
    after = on_card.uvm(uvm.REGISTER_GPU, bytes(40))[2]

    statuses = [struct.unpack_from("<I", each, 36)[0] for each in (before, after)]
    assert statuses == [abi.NV_ERR_BUSY_RETRY, abi.NV_OK]
