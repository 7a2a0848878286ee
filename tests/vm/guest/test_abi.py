"""/dev/qgpu refuses what it does not understand, and changes nothing then."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select

import nv
import pytest
import qg

MS = qg.MS
N = qg.uapi.NUMBERS


def errno_of(function, *args, **fields):
    try:
        function(*args, **fields)
    except OSError as error:
        return error.errno
    return 0


@pytest.mark.parametrize("cmd", [0, 0xC0045101, 0x80005101, 0xC0085163, 0x80085201])
def test_unknown_commands_are_enotty(qgpu, cmd):
    with pytest.raises(OSError, match="Inappropriate") as refused:
        fcntl.ioctl(qgpu.fd, cmd, bytearray(512), True)

    assert refused.value.errno == errno.ENOTTY


def sized(name, size):
    """A command as a caller whose struct has this many bytes says it."""
    return qg.uapi.COMMANDS[name] & ~(0x3FFF << 16) | size << 16


def test_a_caller_of_any_version_can_ask_for_the_version(qgpu):
    answer = bytearray(4)
    fcntl.ioctl(qgpu.fd, sized("QGPU_IOC_INFO", 4), answer, True)
    longer = bytearray(b"\xff" * 1024)
    fcntl.ioctl(qgpu.fd, sized("QGPU_IOC_INFO", 1024), longer, True)

    assert int.from_bytes(answer, "little") == N["QGPU_ABI_VERSION"]
    assert longer[:4] == answer
    assert not any(longer[qg.uapi.ffi.sizeof("struct qgpu_info") :])


def test_structs_of_older_and_newer_callers_are_understood(qgpu, pod):
    """An older one lacks the last member, which counts as 0; a newer one has more, which must be 0."""
    web = pod("web", memory=5 << 20, latency_target_ns=7)
    grant = bytes(qg.uapi.ffi.buffer(qg.uapi.ffi.new("struct qgpu_grant *", {"pod": web.id, "memory": 6 << 20})))
    fcntl.ioctl(qgpu.fd, sized("QGPU_IOC_GRANT_SET", len(grant) - 8), bytearray(grant[:-8]), True)
    assert qgpu.ioctl("GRANT_GET", pod=web.id).latency_target_ns == 0
    fcntl.ioctl(qgpu.fd, sized("QGPU_IOC_GRANT_SET", len(grant) + 64), bytearray(grant + bytes(64)), True)
    with pytest.raises(OSError, match="Argument list too long") as refused:
        fcntl.ioctl(qgpu.fd, sized("QGPU_IOC_GRANT_SET", len(grant) + 8), bytearray(grant + b"\1" + bytes(7)), True)

    assert refused.value.errno == errno.E2BIG
    assert qgpu.ioctl("GRANT_GET", pod=web.id).memory == 6 << 20


@pytest.mark.parametrize("name", qg.uapi.COMMANDS)
def test_bad_pointers_are_efault(qgpu, name):
    assert errno_of(fcntl.ioctl, qgpu.fd, qg.uapi.COMMANDS[name], 8) == errno.EFAULT


@pytest.mark.parametrize(
    ("call", "fields", "expected"),
    [
        ("GPU", {"gpu": 1}, errno.ENOENT),
        ("GPU", {"gpu": 2**32 - 1}, errno.ENOENT),
        ("POD_ADD", {"cgroup_fd": -1, "name": b"x"}, errno.EBADF),
        ("POD_ADD", {"cgroup_fd": 0, "name": b"x"}, errno.EBADF),
        ("POD_ADD", {"cgroup_fd": 0, "name": b""}, errno.EINVAL),
        ("POD_ADD", {"cgroup_fd": 0, "name": b"x" * 64}, errno.EINVAL),
        ("POD_ADD", {"cgroup_fd": 0, "name": b"x\0y"}, errno.EINVAL),
        ("POD_ADD", {"cgroup_fd": 0, "name": b"x", "flags": 1}, errno.EINVAL),
        ("POD_REMOVE", {"pod": 0}, errno.EINVAL),
        ("POD_REMOVE", {"pod": 2**63}, errno.EINVAL),
        ("POD_NEXT", {"pod": 2**64 - 1}, errno.ENOENT),
        ("USAGE", {"pod": 2**63, "gpu": 0}, errno.EINVAL),
        ("TSG_NEXT", {"gpu": 9}, errno.EINVAL),
        ("RENEW", {"gpu": 0}, errno.ENOENT),
        ("RENEW", {"gpu": 9}, errno.EINVAL),
        ("RENEW", {"gpu": 0, "flags": 1}, errno.EINVAL),
        ("IDLE", {"pod": 1, "gpu": 0, "idle": 2}, errno.EINVAL),
        ("IDLE", {"pod": 1, "gpu": 9}, errno.EINVAL),
    ],
)
def test_calls_without_a_pod_are_checked(qgpu, call, fields, expected):
    assert errno_of(qgpu.ioctl, call, **fields) == expected


def test_calls_on_a_pod_are_checked(qgpu, pod):
    web = pod("web", memory=1 << 20)
    fd = os.open(web.cgroup, os.O_RDONLY)
    grant = {"pod": web.id, "gpu": 0}
    try:
        assert errno_of(qgpu.ioctl, "POD_ADD", cgroup_fd=fd, name=b"twice") == errno.EEXIST
    finally:
        os.close(fd)
    for bad in ({"gpu": 1}, {"pod_class": 2}, {"cores": 101}, {"flags": 1}, {"pod": web.id + 1}):
        assert errno_of(qgpu.ioctl, "GRANT_SET", **(grant | bad)) == errno.EINVAL, bad
    for bad in ({"flags": 1}, {"pad": 1}):
        assert errno_of(qgpu.ioctl, "POD_REMOVE", pod=web.id, **bad) == errno.EINVAL, bad

    assert qgpu.ioctl("GRANT_GET", **grant).memory == 1 << 20


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ((49,), {}),
        ((1_000_001,), {}),
        ((1000, [(0, 0, 0)]), {}),
        ((1000, [(5, 4, 0)]), {}),
        ((1000, [(0, 101 * MS, 0)]), {}),
        ((1000, [(0, 2, 0), (1, 3, 0)]), {}),
        ((1000, [(2, 3, 0), (0, 1, 0)]), {}),
        ((1000, [(0, 1, 2)]), {}),
        ((1000,), {"flags": 1}),
        ((1000,), {"period_ns": 9 * MS}),
        ((1000,), {"period_ns": 10_001 * MS}),
        ((1000,), {"period_ns": 2**64 - 1}),
        ((1000,), {"lease_ns": 0}),
        ((1000,), {"lease_ns": 2**64 - 1}),
        ((1000,), {"nr_pods": 257}),
        ((1000,), {"nr_windows": 1025}),
        ((1000, []), {"gate": 4}),
        ((1000, []), {"gate": qg.COPIES}),  # with no gate to cover them
        ((1000,), {"pad": 1}),
        ((1000,), {"pod_plan_size": 31}),
        ((1000,), {"pod_plan_size": N["QGPU_MAX_POD_PLAN_SIZE"] + 1}),
        ((1000,), {"gpu": 1}),
    ],
)
def test_plans_are_checked(qgpu, pod, part, more):
    web = pod("web")

    assert errno_of(qgpu.plan, (web.id, *part), **more) == errno.EINVAL
    assert errno_of(qgpu.ioctl, "RENEW", gpu=0) == errno.ENOENT


@pytest.mark.parametrize("timeslice_us", [49, 1_000_001, 2**64 - 1])
def test_copy_timeslices_are_checked(qgpu, pod, timeslice_us):
    web = pod("web")

    assert errno_of(qgpu.plan, (web.id, 1000), copies={web.id: timeslice_us}) == errno.EINVAL


def send_plan(qgpu, element, size):
    """A plan of one pod, described in memory of its own."""
    block = qg.uapi.ffi.from_buffer(element)
    at = int(qg.uapi.ffi.cast("uintptr_t", block))
    qgpu.plan(pods=at, nr_pods=1, pod_plan_size=size)


def test_pods_of_longer_and_shorter_plans_are_understood(qgpu, pod):
    """A newer caller has more members, which must be 0."""
    web = pod("web")
    known = {"pod": web.id, "timeslice_us": 1000, "copy_timeslice_us": 2000}
    element = bytes(qg.uapi.ffi.buffer(qg.uapi.ffi.new("struct qgpu_pod_plan *", known)))
    for length, size in ((len(element) - 8, 0), (len(element) - 8, len(element) - 8), (len(element), len(element))):
        send_plan(qgpu, element[:length], size)
    send_plan(qgpu, element + bytes(8), len(element) + 8)

    assert errno_of(send_plan, qgpu, element + b"\1" + bytes(7), len(element) + 8) == errno.E2BIG


def test_plans_of_unreadable_memory_or_doubled_pods_are_refused(qgpu, pod):
    web = pod("web")

    assert errno_of(qgpu.plan, (web.id, 1000), pods=8) == errno.EFAULT
    assert errno_of(qgpu.plan, (web.id, 1000, [(0, 1, 0)]), windows=8) == errno.EFAULT
    assert errno_of(qgpu.plan, (web.id, 1000), (web.id, 1000)) == errno.EINVAL


def test_events_are_whole_polled_and_bounded(qgpu, pod):
    assert errno_of(os.read, qgpu.fd, 8) == errno.EINVAL
    qgpu.events()
    poll = select.poll()
    poll.register(qgpu.fd, select.POLLIN)
    assert poll.poll(0) == []
    web = pod("web")
    assert poll.poll(1000) == [(qgpu.fd, select.POLLIN)]
    for cores in range(300):
        web.grant(gpu=0, cores=cores % 100)
    events = [event for _ in range(3) for event in qgpu.events()]

    assert len(events) == 257
    assert (events[-1].type, events[-1].value) == (N["QGPU_EVENT_LOST"], 301 - 256)


def test_refusals_do_not_push_out_other_events(qgpu, pod):
    """A pod can be refused as often as it likes."""

    def ask(state):
        p = nv.Program()
        for _ in range(300):
            with contextlib.suppress(nv.RmError):
                p.control(p.subdevice, 0x80170F)

    web = pod("web")
    process = web.process()
    qgpu.events()
    process.run(ask)
    web.grant(gpu=0, cores=7)
    events = [event for _ in range(3) for event in qgpu.events()]

    assert web.info().refused_controls == 300
    assert [event.type for event in events][-2:] == [N["QGPU_EVENT_POD_CHANGED"], N["QGPU_EVENT_LOST"]]


def test_pods_outlive_the_daemon_and_keep_their_grants(qgpu, pod):
    web = pod("web", gpu=0, memory=5 << 20, cores=30, pod_class=1, latency_target_ns=2_000_000)
    again = qg.Qgpu()
    try:
        (found,) = again.pods()
        grant = again.ioctl("GRANT_GET", pod=found.pod, gpu=0)
        assert (found.pod, qg.uapi.ffi.string(found.name)) == (web.id, b"web")
        assert found.cgroup == os.stat(web.cgroup).st_ino
        assert (grant.memory, grant.cores, grant.pod_class) == (5 << 20, 30, 1)
        assert grant.latency_target_ns == 2_000_000
    finally:
        again.close()


def test_ids_are_not_used_again(qgpu, pod):
    first = pod("one").id
    qgpu.ioctl("POD_REMOVE", pod=first)

    assert pod("two").id > first
    assert errno_of(qgpu.ioctl, "POD_REMOVE", pod=first) == errno.ENOENT


def test_only_root_opens_it(qgpu):
    def as_nobody(state):
        os.chmod("/dev/qgpu", 0o666)
        os.setuid(65534)
        try:
            os.open("/dev/qgpu", os.O_RDWR)
        except PermissionError as error:
            return error.errno
        return 0

    process = qg.Process(None)
    try:
        assert process.run(as_nobody) == errno.EPERM
    finally:
        process.stop()


def test_nobody_in_a_pod_opens_it_root_neither(pod):
    def as_root(state):
        try:
            os.open("/dev/qgpu", os.O_RDWR)
        except PermissionError as error:
            return error.errno
        return 0

    assert pod("web").process().run(as_root) == errno.EPERM
