"""Ways around the judge: wrapped, rewritten, exchanged, 32-bit; none of them leads anywhere."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from qgpu.guardian.proxy import passthrough
from qgpu.linux import seccomp_notify, thread_freezer
from qgpu.linux.inflight_syscalls import InflightSyscall
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, control, free, status
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import MINOR, held


def test_a_wrapped_call_is_carried_out_as_what_it_wraps(on_card):
    inner = control(abi.NV2080_FIFO_DISABLE_CHANNELS)
    *_, answered = on_card.call_for_params(
        abi.NV_ESC_IOCTL_XFER_CMD, struct.pack("<IIQ", abi.NV_ESC_RM_CONTROL, len(inner), 0), inner, pointer_at=8
    )

    assert status(answered) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_only_calls_that_are_judged_may_be_wrapped(pod):
    call = struct.pack("<IIQ", 0x5A, 48, 0)  # RM has no such call

    assert pod.call(abi.NV_ESC_IOCTL_XFER_CMD, call, bytes(48), pointer_at=8)[:2] == (-1, errno.EINVAL)


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (abi.NV_ESC_RM_I2C_ACCESS, abi.I2C_ACCESS_BYTES),
        (abi.NV_ESC_RM_ACCESS_REGISTRY, abi.ACCESS_REGISTRY_BYTES),
        (abi.NV_ESC_RM_BIND_CONTEXT_DMA, abi.BIND_CONTEXT_DMA_BYTES),
    ],
    ids=["i2c", "registry", "bind"],
)
def test_calls_whose_owner_rm_does_not_check_are_refused(pod, number, size):
    pod.limits.clear()
    wrapped = struct.pack("<IIQ", number, size, 0)

    assert pod.call(number, bytes(size))[:2] == (-1, errno.EOPNOTSUPP)
    assert pod.call(abi.NV_ESC_IOCTL_XFER_CMD, wrapped, bytes(size), pointer_at=8)[:2] == (-1, errno.EOPNOTSUPP)
    assert pod.rm.seen == []


@pytest.mark.parametrize("limits", [{}, {0: 1 << 40}])
@pytest.mark.parametrize(
    ("number", "inner"),
    [
        (abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT_CLIENT, 0)),
        (abi.NV_ESC_RM_ALLOC_MEMORY, struct.pack("<IIII", 7, 2, 9, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR) + bytes(40)),
        (abi.NV_ESC_RM_ALLOC_MEMORY, struct.pack("<IIII", 7, 2, 9, abi.NV01_MEMORY_SYSTEM) + bytes(40)),
        (abi.NV_ESC_EXPORT_TO_DMABUF_FD, bytes(2608)),
        (abi.NV_ESC_RM_MAP_MEMORY_DMA, bytes(min(abi.MAP_MEMORY_DMA))),
        (abi.NV_ESC_IOCTL_XFER_CMD, bytes(16)),
    ],
    ids=["root client", "user memory", "mapped memory", "dma-buf", "mapping", "wrapped"],
)
def test_a_wrapped_call_is_never_left_to_the_kernel(pod, number, inner, limits, monkeypatch):
    """What it wraps could be any other call by then."""
    left = []
    monkeypatch.setattr(
        seccomp_notify.Listener, "proceed", lambda self, id_: left.append(id_) or self.answer_error(id_, 1)
    )
    pod.limits.clear()
    pod.limits.update(limits)
    pod.call(abi.NV_ESC_IOCTL_XFER_CMD, struct.pack("<IIQ", number, len(inner), 0), inner, pointer_at=8)

    assert left == []


def test_system_memory_with_a_mapping_is_made_by_the_kernel(on_card):
    """RM prepares the mapping only for the client's own process."""
    asked = struct.pack("<IIII", 7, 2, 9, abi.NV01_MEMORY_SYSTEM) + bytes(32) + struct.pack("<ii", 5, 0)

    assert on_card.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)[:2] == (-1, errno.EINVAL)  # /dev/random's answer
    assert abi.NV_ESC_RM_ALLOC_MEMORY not in [number for number, _ in on_card.rm.seen]


def test_a_call_on_another_kind_of_file_does_not_reach_it(pod):
    pod.shared.major = 195

    assert pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[:2] == (-1, errno.ENOTTY)


def test_a_dma_buf_is_not_made_under_a_limit(pod):
    assert pod.call(abi.NV_ESC_EXPORT_TO_DMABUF_FD, bytes(2608))[:2] == (-1, errno.EOPNOTSUPP)


def test_arguments_that_change_during_the_check_gain_nothing(on_card):
    """A thread of the pod writes another size and another handle all the time; RM gets what was charged."""
    on_card.limits[0] = 64 * PAGE
    on_card.tell("hammer 30")  # each of 30 allocations is rewritten to ask for 1 TiB under handle 0x99
    statuses = on_card.answer()[2]

    on_the_card = sum(on_card.rm.sizes[key] for key in on_card.rm.objects if key in on_card.rm.sizes)
    assert statuses
    assert held(on_card) == on_the_card <= 64 * PAGE


@pytest.mark.parametrize("own_table", [False, True])
def test_what_is_let_through_goes_to_the_file_that_was_looked_at(pod, own_table, monkeypatch):
    """A thread puts another file in the descriptor's place all the time, or the caller has another one there."""

    @contextmanager
    def held_late(*who):
        time.sleep(0.002)  # time enough for an exchange between our first look and their standing still
        with thread_freezer.frozen_siblings(*who):
            yield

    monkeypatch.setattr(
        passthrough, "thread_freezer", SimpleNamespace(**vars(thread_freezer) | {"frozen_siblings": held_late})
    )
    # Root clients may be made again and again, where /dev/null was not seen at the first look.
    seen = SimpleNamespace(has=lambda file: os.minor(os.fstat(file).st_rdev) != MINOR, add=lambda file: True)
    seen.discard = lambda file: None
    pod.shared.files = SimpleNamespace(roots=seen, devices=seen)
    pod.tell(f"exchange 60 {int(own_table)}")
    asked, on_the_other, _ = pod.answer()

    assert (asked, on_the_other) == (60, 0)


def test_the_others_stand_still_until_the_kernel_is_done(pod, monkeypatch):
    order = []

    @contextmanager
    def held(*who):
        with thread_freezer.frozen_siblings(*who):
            order.append("thread_freezer")
            yield
            order.append("free")

    def over(call):
        wait(call)
        order.append("over")

    wait = InflightSyscall.wait
    monkeypatch.setattr(InflightSyscall, "wait", over)
    monkeypatch.setattr(
        passthrough,
        "thread_freezer",
        SimpleNamespace(**vars(thread_freezer) | {"frozen_siblings": held}),
    )
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT_CLIENT, 0))

    assert order == ["thread_freezer", "over", "free"]


def test_unwritable_refusal_is_not_executed_either(pod):
    pod.tell("readonly")
    result, error, _ = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))

    assert (result, error) == (-1, errno.EFAULT)


def test_a_call_that_breaks_the_judge_is_answered_all_the_same(pod):
    pod.shared.table = None
    result, error, _ = pod.call(abi.NV_ESC_RM_FREE, free(3))

    assert (result, error) == (-1, errno.EIO)


@pytest.mark.parametrize("name", [b"\x0cTgid:\t%d", b"\x1eTgid:\t%d", b"\xff) S %d"])
def test_spoofed_process_name_does_not_change_its_pod(pod, name):
    pod.tell(f"name {(name % os.getpid()).hex()}")
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))

    assert pod.shared.table.processes == {pod.process.pid: "web"}


def test_nothing_is_done_with_files_of_a_maybe_reused_pid(pod, monkeypatch):
    """Whoever waits no longer when its descriptor was taken was gone, maybe, and another process in its place."""
    monkeypatch.setattr(seccomp_notify.Listener, "still_waiting", lambda self, id_: False)

    assert pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[:2] == (-1, errno.EINTR)
    assert pod.rm.seen == []


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to choose a process's number")
@pytest.mark.parametrize(
    ("number", "call"),
    [(abi.NV_ESC_RM_CONTROL, control(0x20800110)), (abi.NV_ESC_RM_FREE, free(3))],
    ids=["short way", "long way"],
)
def test_no_answer_is_written_to_who_got_a_killed_callers_pid(pod, number, call):
    """The caller is killed while RM works, which can take as long as it likes, and a neighbour gets its number."""
    pod.begin(number, call)
    with reborn_during(pod) as served:
        written = served()

    assert written == b"\n"


def test_answer_kept_away_by_a_signal_goes_to_the_restarted_call(pod, monkeypatch):
    """Without WAIT_KILLABLE_RECV a signal's handler runs first, and then the thread makes its call again."""
    pod.begin(abi.NV_ESC_RM_FREE, free(3))
    listener = pod.shared.listeners[pod.number][1]
    call = listener.receive()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(seccomp_notify.Listener, "still_waiting", lambda self, id_: bool(pod.rm.seen) is False)
        interrupted.setattr(seccomp_notify.Listener, "answer_ok", lambda self, id_: False)
        pod.dispatcher.serve(listener, call)
    pod.dispatcher.serve(listener, call)
    result, _, argument = pod.answer()

    assert (result, struct.unpack_from("<I", argument, 12)[0]) == (0, abi.NV_ERR_OBJECT_NOT_FOUND)
    assert len(pod.rm.seen) == 1


@contextmanager
def reborn_during(pod):
    """Serve a pod's call while it is killed and another process gets its pid; yield what tells that one's memory."""
    listener = pod.shared.listeners[pod.number][1]
    call = listener.receive()
    others = []

    def perform(*what):
        pod.process.kill()
        pod.process.wait()
        others.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.reborn", str(call.tid), str(call.argument)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert others[0].stdout.readline() == b"ready\n"
        return pod.rm.perform(*what)

    def served():
        pod.dispatcher.serve(listener, call)
        (other,) = others
        other.stdin.write(b"\n")
        other.stdin.flush()
        return other.stdout.readline()

    pod.shared.perform = perform
    pod.dispatcher = pod.dispatcher_of(pod.shared, pod.number)
    try:
        yield served
    finally:
        for other in others:
            other.stdin.close()
            other.wait()
            other.stdout.close()


def test_a_32_bit_call_is_judged_like_any_other(pod):
    pod.tell(f"int80 {abi.NV2080_FIFO_DISABLE_CHANNELS}")
    result, _, argument = pod.answer()
    if result == -errno.ENOSYS:
        pytest.skip("this kernel runs no 32-bit calls")

    assert (result, status(argument)) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)


def test_a_second_numbering_of_the_calls_does_not_exist(pod):
    pod.tell("x32")

    assert pod.answer()[:2] == (-1, errno.ENOSYS)
