"""Managed memory in a memory map that processes share: charged while any of them lives, whoever made the mapping."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from contextlib import suppress

import pytest

from qgpu.guardian.accounting import managed_memory
from qgpu.linux import pod_processes, proc
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import control
from tests.guardian.failover.test_successors import successor_of
from tests.guardian.pod import held, until

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="processes that run its machine code")

SIZE, ADDRESS = 64 << 20, 0x204A00000
COST = managed_memory.cost_of(ADDRESS, SIZE)


@pytest.fixture
def sharing(on_card):
    """A pod with room for three such mappings, whose process starts others that share its memory."""
    on_card.limits[0] = 3 * COST
    pid, silent = on_card.process.pid, []

    def let_sharer_map(address=ADDRESS):
        """Let a process that shares the memory map and end; return whether it could map."""
        on_card.tell(f"vmsharer {SIZE} {address}")
        sharer, failed, _ = on_card.answer()
        if sharer in on_card.shared.table.processes:
            on_card.shared.exited(sharer)
        return not failed

    def start_silent():
        on_card.tell("vmsilent")
        silent.append(on_card.answer()[0])
        return silent[-1]

    def execute():
        """Let the process execute another program."""
        on_card.tell("exec")
        until(lambda: proc.name(pid) == "sleep")

    def end_silent():
        for each in silent:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        until(lambda: not any(map(managed_memory.mapped, silent)))  # nobody may wait for them
        silent.clear()

    on_card.let_sharer_map, on_card.start_silent, on_card.execute = let_sharer_map, start_silent, execute
    on_card.end_silent, on_card.search = end_silent, on_card.shared.quota.search
    yield on_card
    end_silent()


@pytest.fixture
def in_cgroup(sharing, monkeypatch):
    """All that the pod's process starts, and itself, are in the pod's cgroup."""
    of_pod = {sharing.process.pid}

    def listed(_, known):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if proc.status(int(name), "PPid") and int(proc.status(int(name), "PPid")[0]) in of_pod:
                    of_pod.add(int(name))
        return of_pod | set(known)

    monkeypatch.setattr(pod_processes, "processes_of", listed)
    return sharing


def use_uvm(pod):
    pod.uvm(uvm.INITIALIZE, bytes(16))
    pod.uvm(uvm.REGISTER_GPU, bytes(40))


def call(pod):
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))


def test_mapping_of_ended_sharer_stays_charged(sharing):
    use_uvm(sharing)
    before = held(sharing)
    mapped = sharing.let_sharer_map()
    left = held(sharing)
    sharing.search.clear("web")

    assert (before, mapped, left, held(sharing)) == (0, True, COST, COST)
    assert managed_memory.mapped(sharing.process.pid) == COST
    assert sharing.shared.table.allocations.managed == {sharing.process.pid: COST}


def test_sharers_that_map_and_end_get_no_more_than_limit(sharing):
    use_uvm(sharing)
    mapped = [sharing.let_sharer_map(ADDRESS + n * SIZE) for n in range(8)]
    now = managed_memory.mapped(sharing.process.pid)

    assert 0 < now <= held(sharing) <= 3 * COST
    assert mapped == sorted(mapped, reverse=True)
    assert mapped.count(True) * SIZE <= now


def test_unmapped_memory_of_sharers_can_be_mapped_again(sharing):
    """They map at the same addresses, so each mapping takes the place of the one before."""
    use_uvm(sharing)

    assert all(sharing.let_sharer_map() for _ in range(8))


def test_sharer_that_ended_before_uvm_was_used_is_charged(sharing):
    """Another process registers the card, and a third shares the memory."""
    other = subprocess.Popen(["sleep", "60"])
    sharing.let_sharer_map()
    unseen = held(sharing)
    sharing.shared.clients.register_process("web", other.pid)
    made = sharing.dispatcher._mmap.charge_made()
    other.kill()
    other.wait()

    assert (unseen, made, held(sharing)) == (0, True, COST)


def test_sharer_that_ended_without_a_guardian_is_charged(sharing):
    use_uvm(sharing)
    sharing.tell(f"vmsharer {SIZE} {ADDRESS}")
    sharer = sharing.answer()[0]
    known = sharing.shared.table.allocations.managed[sharer]
    successor_of(sharing)

    assert sharer not in sharing.shared.table.processes
    assert (known, held(sharing)) == (0, COST)


def test_charge_left_by_an_exit_outlives_the_guardian(sharing):
    """It dies before it has looked at the other processes, and so does its successor."""
    use_uvm(sharing)
    sharing.let_sharer_map()
    again = type(sharing.shared.table)()
    for fact in sharing.shared.table.facts():
        again.note(fact)

    assert again.allocations.managed_left == sharing.shared.table.allocations.managed_left == {"web": COST}


def test_exec_leaves_charge_of_memory_that_another_shares(in_cgroup):
    use_uvm(in_cgroup)
    in_cgroup.tell(f"mapfixed {SIZE} {ADDRESS}")
    in_cgroup.answer()
    call(in_cgroup)
    silent = in_cgroup.start_silent()
    in_cgroup.execute()
    in_cgroup.dispatcher._mmap._rescan()
    shown = [managed_memory.mapped(pid) for pid in (in_cgroup.process.pid, silent)]
    during = held(in_cgroup)
    in_cgroup.end_silent()
    in_cgroup.search._last.clear()  # nothing has rested long enough yet
    in_cgroup.dispatcher._mmap._rescan()

    assert (shown, during, held(in_cgroup)) == ([0, COST], COST, 0)


def test_process_that_makes_no_call_is_charged_at_registration(in_cgroup):
    """The one that mapped for both is another program by then."""
    in_cgroup.tell(f"mapfixed {SIZE} {ADDRESS}")
    in_cgroup.answer()
    call(in_cgroup)
    in_cgroup.start_silent()
    in_cgroup.execute()
    made = in_cgroup.dispatcher._mmap.charge_made()

    assert (made, held(in_cgroup)) == (True, COST)


def test_memory_that_two_share_is_charged_once(in_cgroup):
    """vfork does that all the time."""
    use_uvm(in_cgroup)
    in_cgroup.tell(f"mapfixed {SIZE} {ADDRESS}")
    in_cgroup.answer()
    call(in_cgroup)
    silent = in_cgroup.start_silent()
    in_cgroup.search.charge_all("web")

    assert managed_memory.mapped(silent) == COST
    assert held(in_cgroup) == COST


@pytest.fixture
def ended(sharing, monkeypatch):
    """A pod most of whose limit a process had that has just ended."""
    other = subprocess.Popen(["sleep", "60"])
    sharing.shared.clients.register_process("web", other.pid)
    sharing.shared.quota.will_use_uvm(other.pid)
    assert sharing.shared.quota.reserve_mapping("web", other.pid, 3 * COST)
    other.kill()
    other.wait()
    sharing.shared.exited(other.pid)
    return sharing


def test_next_program_gets_memory_of_the_one_that_ended(ended):
    """It is not refused though nobody has looked at the pod's other processes yet."""
    left = held(ended)
    use_uvm(ended)
    ended.tell(f"mapfixed {SIZE} {ADDRESS}")

    assert (left, ended.answer()[0], held(ended)) == (3 * COST, 0, COST)


def test_search_that_finds_nothing_new_is_not_repeated(ended, monkeypatch):
    ended.search.clear("web")
    searched = []
    monkeypatch.setattr(type(ended.search), "_unclaimed", lambda self, pod: searched.append(pod) or 0)
    for _ in range(3):
        ended.search.clear("web")

    assert (held(ended), searched) == (0, [])


def test_search_that_another_thread_ends_makes_room(ended):
    """It ends after the memory did not fit, and before this thread wants to search."""
    ended.search.clear("web")

    assert (ended.dispatcher._mmap._rescan(), ended.dispatcher._mmap._rescan()) == (True, False)


def test_exit_during_a_search_is_left_to_the_next(ended, monkeypatch):
    look = type(ended.search)._unclaimed

    def slowly(self, pod):
        found = look(self, pod)
        ended.shared.note({"fact": "managed_left", "pod": "web", "bytes": 4 * COST})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(type(ended.search), "_unclaimed", slowly)
        assert ended.search.charge_all("web")
    left = held(ended)
    ended.search.clear("web")

    assert (left, held(ended)) == (COST, 0)


def test_processes_that_come_and_go_keep_the_charge(ended, monkeypatch):
    """Each may have shared the memory of one that has ended since."""
    monkeypatch.setattr(pod_processes, "_PATIENCE_S", 0.0)
    numbers = iter(range(1 << 22, 1 << 23))
    monkeypatch.setattr(pod_processes, "processes_of", lambda *_: {next(numbers)})
    ended.search.clear("web")
    left = held(ended)
    monkeypatch.undo()
    ended.search._last.clear()
    ended.search.clear("web")

    assert (left, held(ended)) == (3 * COST, 0)


def test_pod_without_processes_keeps_nothing(ended):
    ended.shared.note({"fact": "ended", "name": "web"})

    assert held(ended) == 0


def test_mapping_waits_until_all_unseen_ones_are_known(sharing, monkeypatch):
    sharing.let_sharer_map()
    sharing.shared.quota.will_use_uvm(sharing.process.pid)
    monkeypatch.setattr(type(sharing.search), "_unclaimed", _fail)
    refused = sharing.let_sharer_map(ADDRESS + SIZE)
    monkeypatch.undo()

    assert (refused, sharing.let_sharer_map(ADDRESS + SIZE)) == (False, True)


def _fail(*_):
    raise OSError("not all could be seen")


def test_end_of_process_without_mappings_needs_no_search(sharing):
    other = subprocess.Popen(["sleep", "60"])
    sharing.shared.clients.register_process("web", other.pid)
    other.kill()
    other.wait()
    sharing.shared.exited(other.pid)

    assert not sharing.search.is_due("web")
