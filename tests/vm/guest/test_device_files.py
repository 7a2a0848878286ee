"""Enforcement on the file: who uses what a pod has opened of NVIDIA's devices, with the BPF program and without.

No module of ours is loaded, and no daemon: the program alone does it, as on the user-space plane.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import nv
import pytest
import qg

from qgpu.errors import NotSupportedError
from qgpu.linux import cgroup
from qgpu.lsm import device_files, libbpf, pins

#: A call, one of a 32-bit program (RM takes it for nonsense), and a mapping.
WORKS, REFUSED = (0, errno.EINVAL, 0), (errno.EPERM,) * 3
COMPILED = qg.BUILD / "device_files.bpf.o"
BPF, SECURITY = Path("/sys/fs/bpf"), Path("/sys/kernel/security")
_libc = ctypes.CDLL(None, use_errno=True)


def mounted(kind: str, at: Path) -> None:
    if not os.path.ismount(at) and _libc.mount(kind.encode(), bytes(at), kind.encode(), 0, None):
        raise OSError(ctypes.get_errno(), f"mount {kind}")


@pytest.fixture(scope="module", autouse=True)
def _able():
    """Skip where the kernel or the host that built this cannot."""
    try:
        mounted("securityfs", SECURITY)
        mounted("bpf", BPF)
        device_files.check_kernel()
    except (OSError, NotSupportedError) as error:
        pytest.skip(str(error))
    if not COMPILED.exists():
        pytest.skip("no clang, or no headers of libbpf, where this was built")


@pytest.fixture
def groups():
    """Three cgroups by name: two pods, and the guardian's. The processes made in them or outside end with the test."""
    made = {name: qg.CGROUPS / name for name in ("one", "other", cgroup.GUARDIANS.lstrip("/"))}
    processes = []

    def process(where: str | None) -> qg.Process:
        processes.append(qg.Process(made[where] if where else None))
        return processes[-1]

    for path in made.values():
        path.mkdir()
    yield process
    for each in processes:
        each.kill()
    for path in made.values():
        qg.until(lambda path=path: not (path / "cgroup.procs").read_text())
        path.rmdir()


@pytest.fixture
def loaded():
    """The program in the kernel, knowing the pods."""
    found = device_files.load(("/one", "/other"), COMPILED)
    yield found
    found.close()
    pins.remove()
    assert not pins.DIRECTORY.exists()


# what processes are told to do


def opens(state, path):
    return os.open(path, os.O_RDWR)


def calls(state, fd):
    """Make a client of RM's by a descriptor; 0, or what the kernel says."""
    data = bytearray(nv._ALLOC.pack(0, 0, 0, nv.ROOT, 0, 0, 0, 0, 0xFFFF, 0))
    try:
        nv.call(fd, 0x2B, data)
    except OSError as error:
        return error.errno
    return nv._ALLOC.unpack(data)[8]


#: ioctl(edi, esi, edx) as a 32-bit program makes it: int 0x80.
COMPAT = bytes.fromhex("53 b8 36000000 89fb 89f1 cd80 5b 4898 c3")


def calls32(state, fd):
    """Make a call that RM does not understand as a 32-bit program does; what the kernel says."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(COMPAT)
    at = ctypes.addressof(ctypes.c_char.from_buffer(code))
    ioctl = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_uint)(at)
    return -ioctl(fd, nv.word(0x2B, 0), 0)


def maps(state, fd):
    try:
        mmap.mmap(fd, 4096).close()
    except OSError as error:
        return error.errno
    return 0


def sends(state, fds, name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)
        peer, _ = listener.accept()
        with peer:
            socket.send_fds(peer, [b"x"], fds)
            peer.recv(1)


def receives(state, count, name):
    """The descriptors that came through a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        for _ in range(2000):
            with contextlib.suppress(ConnectionRefusedError):
                peer.connect(f"\0{name}")
                break
        return socket.recv_fds(peer, 16, count)[1]


def takes(state, pid, fd):
    try:
        return qg.take_descriptor(pid, fd)
    except AssertionError:
        return -1


def reopens(state, pid, fd):
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)


def moves(state, where):
    Path(where, "cgroup.procs").write_text(str(os.getpid()))


def forks(state, where, fd):
    """What a child gets that leaves for another cgroup with a descriptor: by calls of both kinds, and a mapping."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        moves(state, where)
        os.write(writer, struct.pack("iii", calls(state, fd), calls32(state, fd), maps(state, fd)))
        os._exit(0)
    os.waitpid(child, 0)
    return struct.unpack("iii", os.read(reader, 12))


def pass_on(sender, fds, receiver, name="files"):
    sender.start(sends, fds, name)
    got = receiver.run(receives, len(fds), name)
    sender.result()
    return got


def ways(process):
    """What a process outside all pods, and one of another pod, get of a pod's files, by each way there is."""
    pod, outside, other = process("one"), process(None), process("other")
    ctl, card = pod.run(opens, nv.CTL), pod.run(opens, nv.GPU.format(0))
    assert (pod.run(calls, ctl), pod.run(maps, card)) == (0, 0), "the pod itself"
    received = pass_on(pod, [ctl, card], outside)
    between = pass_on(pod, [ctl, card], other)
    return {
        "received outside": len(received),
        "called outside": [outside.run(calls, fd) for fd in received[:1]],
        "mapped outside": [outside.run(maps, fd) for fd in received[1:]],
        "taken": outside.run(takes, pod.pid, ctl) >= 0,
        "inherited": pod.run(forks, str(qg.CGROUPS), ctl),
        "inherited by another pod": pod.run(forks, str(qg.CGROUPS / "other"), ctl),
        "received by another pod": len(between),
        "called by another pod": [other.run(calls, fd) for fd in between[:1]],
    }


def test_without_the_program_anybody_uses_a_pods_files(groups):
    assert ways(groups) == {
        "received outside": 2,
        "called outside": [0],
        "mapped outside": [0],
        "taken": True,
        "inherited": WORKS,
        "inherited by another pod": WORKS,
        "received by another pod": 2,
        "called by another pod": [0],
    }


def test_with_it_nobody_but_the_pod_uses_them(groups, loaded):
    assert ways(groups) == {
        "received outside": 0,
        "called outside": [],
        "mapped outside": [],
        "taken": False,
        "inherited": REFUSED,
        "inherited by another pod": REFUSED,
        "received by another pod": 1,  # what may be an export
        "called by another pod": [errno.EPERM],
    }
    assert loaded.refused() == {"open": 0, "receive": 3, "ioctl": 5, "mmap": 2}
    assert {each.call for each in loaded.refusals()} == {"receive", "ioctl", "mmap"}


def test_cgroups_below_and_the_pods_children_keep_their_files(groups, loaded):
    below = qg.CGROUPS / "one" / "below"
    below.mkdir()
    pod = groups("one")
    ctl = pod.run(opens, nv.CTL)

    assert pod.run(forks, str(below), ctl) == WORKS
    pod.run(moves, str(below))
    fresh = pod.run(opens, nv.CTL)
    assert pod.run(calls, fresh) == 0
    assert pod.run(forks, str(qg.CGROUPS / "one"), fresh) == WORKS
    pod.kill()
    qg.until(lambda: not (below / "cgroup.procs").read_text())
    below.rmdir()


def test_guardian_and_daemon_borrow_pods_files(groups, loaded):
    pod, guardian = groups("one"), groups("qgpu-guardian")
    ctl = pod.run(opens, nv.CTL)

    taken = guardian.run(takes, pod.pid, ctl)
    assert (guardian.run(calls, taken), guardian.run(maps, taken)) == (0, 0)
    mine = qg.take_descriptor(pod.pid, ctl)
    assert calls(None, mine) == 0
    os.close(mine)


def test_files_of_the_host_are_the_hosts(groups, loaded):
    outside, pod, second = groups(None), groups("one"), groups(None)
    ctl, card = outside.run(opens, nv.CTL), outside.run(opens, nv.GPU.format(0))

    assert (outside.run(calls, ctl), outside.run(maps, card)) == (0, 0)
    (got,) = pass_on(outside, [ctl], second)
    assert second.run(calls, got) == 0
    (lent,) = pass_on(outside, [ctl], pod)
    assert pod.run(calls, lent) == 0
    again = second.run(reopens, outside.pid, ctl)
    assert second.run(calls, again) == 0


def test_a_new_open_by_way_of_proc_is_its_openers(groups, loaded):
    """Who may open the device has no need of a pod's; a container without it is kept from that by its devices."""
    pod, outside = groups("one"), groups(None)
    ctl = pod.run(opens, nv.CTL)

    assert outside.run(calls, outside.run(reopens, pod.pid, ctl)) == 0


def test_files_of_a_pod_that_was_forgotten_stay_its_own(groups, loaded):
    pod, outside = groups("one"), groups(None)
    ctl = pod.run(opens, nv.CTL)
    loaded.set_pods(("/other",))

    assert pod.run(calls, ctl) == 0
    assert outside.run(takes, pod.pid, ctl) < 0


def test_it_outlives_a_killed_loader(groups):
    loader = subprocess.Popen(
        [sys.executable, "-c", LOADER.format(path=str(COMPILED))], stdout=subprocess.PIPE, text=True
    )
    assert loader.stdout is not None
    assert loader.stdout.readline() == "loaded\n"
    loader.send_signal(signal.SIGKILL)
    loader.wait()
    try:
        pod, outside = groups("one"), groups(None)
        ctl = pod.run(opens, nv.CTL)
        assert outside.run(takes, pod.pid, ctl) < 0
        assert pod.run(forks, str(qg.CGROUPS), ctl) == REFUSED
        device_files.load(("/one",), COMPILED).close()  # the next one finds it
        assert outside.run(takes, pod.pid, ctl) < 0
    finally:
        pins.remove()
    qg.until(lambda: outside.run(takes, pod.pid, ctl) >= 0)  # the kernel lets go of it when it comes to that


LOADER = """
import pathlib, time
from qgpu.lsm import device_files
kept = device_files.load(("/one",), pathlib.Path({path!r}))
print("loaded", flush=True)
time.sleep(600)
"""


def test_another_version_takes_over_what_is_known(groups, loaded, tmp_path):
    pod, outside = groups("one"), groups(None)
    ctl = pod.run(opens, nv.CTL)
    (before,) = pins.links()
    newer = tmp_path / "newer.o"
    newer.write_bytes(COMPILED.read_bytes() + b"\0")  # another digest, the same program

    device_files.load(("/one", "/other"), newer).close()

    (after,) = pins.links()
    assert after != before
    assert outside.run(takes, pod.pid, ctl) < 0
    assert pod.run(calls, ctl) == 0


def test_what_cannot_be_loaded_changes_nothing(groups, loaded, tmp_path):
    broken = tmp_path / "broken.o"
    broken.write_bytes(COMPILED.read_bytes()[:2000])
    pod, outside = groups("one"), groups(None)
    ctl = pod.run(opens, nv.CTL)

    with pytest.raises(OSError, match=r"broken\.o"):
        device_files.load(("/one",), broken)
    assert outside.run(takes, pod.pid, ctl) < 0


def test_freed_files_are_forgotten(groups, loaded):
    """Their addresses come back as other files': these must be nobody's."""
    pod, outside = groups("one"), groups(None)
    for _ in range(3):
        pod.run(opens_and_closes, 300)
        assert outside.run(all_work, 300) == 0
    assert loaded.files() == 0


def test_other_pods_leave_a_new_pod_its_first_files(groups, loaded):
    """The files of others are here addresses that no file has."""
    fill("files")
    pod, outside = groups("one"), groups(None)
    ctl = pod.run(opens, nv.CTL)
    assert pod.run(opens_all_it_may, nv.CTL) == FIRST_FILES - 1

    assert (pod.run(calls, ctl), outside.run(takes, pod.pid, ctl)) == (0, -1)
    pod.run(closes_all)
    assert loaded.files() == 1
    assert pod.run(opens_all_it_may, nv.CTL) == FIRST_FILES - 1
    assert groups("other").run(opens_all_it_may, nv.CTL) == FIRST_FILES


def test_a_pods_first_files_are_kept_with_the_others_if_need_be(groups, loaded):
    fill("first_files")
    pod, outside = groups("one"), groups(None)
    ctl = pod.run(opens, nv.CTL)
    assert pod.run(opens_all_it_may, nv.CTL, FIRST_FILES) == FIRST_FILES
    assert outside.run(takes, pod.pid, ctl) == -1

    pod.run(closes_all)
    assert loaded.files() == 1
    fill("files")
    assert groups("other").run(opens_all_it_may, nv.CTL) == 0


#: FIRST_OF_A_POD.
FIRST_FILES = 512


def fill(name):
    """Put as many files into one of the program's maps as fit."""
    map_, at_once = libbpf.Map(pins.maps() / name, 8, 16), 1 << 14
    update = ctypes.CDLL("libbpf.so.1").bpf_map_update_batch
    at, error = 1, 0
    while error != errno.E2BIG:
        count = ctypes.c_uint32(at_once)
        addresses = struct.pack(f"={at_once}Q", *range(at, at + at_once))
        error = -update(map_.fd, addresses, bytes(16 * at_once), ctypes.byref(count), None)
        at += count.value
    map_.close()


def opens_all_it_may(state, path, most=1000):
    """Open a device until that is refused; how often it was not."""
    state["opened"] = []
    try:
        while len(state["opened"]) < most:
            state["opened"].append(os.open(path, os.O_RDWR))
    except OSError as error:
        if error.errno != errno.ENFILE:
            raise
    return len(state["opened"])


def closes_all(state):
    for fd in state.pop("opened"):
        os.close(fd)


def opens_and_closes(state, count):
    for fd in [os.open(nv.CTL, os.O_RDWR) for _ in range(count)]:
        os.close(fd)


def all_work(state, count):
    fds = [os.open(nv.CTL, os.O_RDWR) for _ in range(count)]
    failed = sum(calls(state, fd) != 0 for fd in fds)
    for fd in fds:
        os.close(fd)
    return failed
