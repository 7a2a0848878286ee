"""TSGs that UVM keeps for registered channels count, or are let go of with RM's handles."""

from __future__ import annotations

import struct
import subprocess

import pytest

from qgpu.guardian.accounting.object_table import COMPUTE_TSG_BYTES
from qgpu.guardian.proxy import held_uvm_files, registered_channels
from qgpu.guardian.proxy.pod_uvm_files import PodUvmFiles
from qgpu.linux import proc
from qgpu.linux.inflight_syscalls import InflightSyscall
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import TSG, TSG_PARAMS, alloc, alloc_status, free
from tests.guardian.failover.test_successors import die_in, successor_of
from tests.guardian.pod import MAJOR, held, until

CHANNEL, SPACE = 0x21, 0x30


@pytest.fixture
def registered(on_card):
    """A pod under a limit, with a UVM file and a TSG whose channel is registered there."""
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(SPACE, 2, abi.FERMI_VASPACE_A), bytes(64))
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    make_channel(on_card, CHANNEL)
    assert held(on_card) == COMPUTE_TSG_BYTES
    return on_card


def make_channel(pod, handle):
    params = bytes(28) + struct.pack("<I", SPACE) + bytes(368)
    assert alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(handle, TSG, 0xC86F), params)[2]) == abi.NV_OK
    pod.uvm(uvm.REGISTER_CHANNEL, bytes(56))  # goes on to /dev/random
    pod.rm.registered.add((7, handle))


@pytest.mark.parametrize("frees", [[CHANNEL, TSG], [TSG], [2], [7]], ids=["channel first", "TSG", "device", "client"])
def test_uvm_lets_go_of_a_tsg_that_its_pod_frees(registered, frees):
    for handle in frees:
        registered.call(abi.NV_ESC_RM_FREE, free(handle))

    assert (registered.rm.registered, held(registered)) == (set(), 0)


def test_contexts_made_again_and_again_cost_no_more(registered):
    registered.call(abi.NV_ESC_RM_FREE, free(TSG))
    for _ in range(5):
        registered.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
        make_channel(registered, CHANNEL)
        registered.call(abi.NV_ESC_RM_FREE, free(TSG))

    assert (registered.rm.registered, held(registered)) == (set(), 0)


def test_a_channel_that_rm_did_not_free_stays_registered(registered):
    """Its parameters said that it uses another object, and RM does not go by them."""
    make_channel(registered, 0x22)
    registered.rm.used.clear()
    registered.rm.objects[7, SPACE] = (abi.NV01_MEMORY_SYSTEM, 2)
    registered.call(abi.NV_ESC_RM_FREE, free(SPACE))

    assert registered.rm.registered == {(7, CHANNEL), (7, 0x22)}
    assert held(registered) == COMPUTE_TSG_BYTES


@pytest.mark.parametrize("limited", [True, False])
def test_a_file_with_an_address_space_is_held_under_a_limit(on_card, limited):
    """Another pod may have opened it, and registered the card there."""
    if not limited:
        on_card.limits.clear()
    on_card.uvm(uvm.REGISTER_GPU_VASPACE, bytes(32))

    assert on_card.shared.uvm_files.count("web") == limited


def test_no_address_space_is_registered_in_a_file_not_held(on_card, monkeypatch):
    monkeypatch.setattr(held_uvm_files, "MOST", 0)
    result, _, argument = on_card.uvm(uvm.REGISTER_GPU_VASPACE, bytes(32))

    assert (result, struct.unpack_from("<I", argument, 28)) == (0, (abi.NV_ERR_NO_MEMORY,))
    assert on_card.shared.refusals.counts["web", "too many UVM files"] == 1


@pytest.fixture
def registering(registered, monkeypatch):
    """A process in the middle of a registration, as far as the guardian can see."""
    monkeypatch.setattr(registered_channels, "_PATIENCE_S", 0.01)
    process = subprocess.Popen(["sleep", "1000"])
    until(lambda: "nanosleep" in proc.wchan(process.pid, process.pid))
    call = InflightSyscall(process.pid, process.pid, proc.syscall(process.pid, process.pid))
    registered.dispatcher._ctx.registering.calls[process.pid] = call
    yield registered
    process.kill()
    process.wait()


def test_a_tsg_freed_beside_a_registration_counts_on(registering):
    registering.call(abi.NV_ESC_RM_FREE, free(TSG))
    kept = held(registering)
    registering.shared.note({"fact": "gone", "client": 7, "handle": 7})
    registering.shared.exited(registering.process.pid)
    registering.shared.listener_closed(registering.number)
    registering.settle()

    assert (kept, held(registering)) == (COMPUTE_TSG_BYTES, 0)


@pytest.mark.parametrize("vanished", [7, CHANNEL], ids=["its file is closed", "RM freed its channel unseen"])
def test_a_tsg_that_uvm_may_keep_counts_until_its_file_closes(registered, vanished):
    registered.rm._free(7, vanished)
    registered.shared.reconciler.recheck([(7, vanished)])
    registered.settle()
    registered.call(abi.NV_ESC_RM_FREE, free(TSG))
    kept = held(registered)
    files = registered.shared.uvm_files
    files.release(files.take(registered.process.pid))
    registered.shared.pod_uvm_files.released(registered.process.pid, [])

    assert (kept, held(registered)) == (COMPUTE_TSG_BYTES, 0)


def test_a_successor_ends_registrations_of_what_was_freed(registered, monkeypatch):
    monkeypatch.setattr(PodUvmFiles, "major", lambda _, request: MAJOR if request in uvm.WATCHED else None)
    die_in(registered, abi.NV_ESC_RM_FREE, free(TSG), after=True)
    successor_of(registered)
    registered.answer()

    assert (registered.rm.registered, held(registered)) == (set(), 0)


@pytest.mark.parametrize(("version", "said"), [("580.1", 28), ("595.45", 12)])
def test_uvm_is_told_of_a_channel_as_its_version_reads_it(registered, version, said):
    registered.shared.uvm_layouts = uvm.layouts(version)
    registered.call(abi.NV_ESC_RM_FREE, free(CHANNEL))
    data = next(data for request, data in registered.rm.seen if request == uvm.UNREGISTER_CHANNEL)

    assert (len(data), data[said - 12 : said - 4]) == (said, struct.pack("<II", 7, CHANNEL))
