"""Pod identity: the version 2 tree is found on unified and on hybrid hosts, and processes stay where they were put."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qgpu.errors import InvalidValueError, NotSupportedError
from qgpu.linux import capabilities, cgroup

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "25 22 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755\n"
    "26 25 0:23 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    "27 25 0:24 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "28 25 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
LEGACY = "26 25 0:23 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(("said", "frozen"), [("populated 1\nfrozen 1\n", True), ("populated 1\nfrozen 0\n", False)])
def test_a_frozen_cgroup_is_told_by_its_events(monkeypatch, tmp_path, said, frozen):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/cgroup.events").write_text(said)
    monkeypatch.setattr(cgroup, "mount", lambda: tmp_path)
    monkeypatch.setattr(cgroup, "of", lambda pid: "/a")

    assert cgroup.is_frozen(os.getpid()) is frozen


def test_process_of_a_joined_cgroup_stays_where_it_is(monkeypatch):
    moved = []
    monkeypatch.setattr(cgroup, "enter", lambda name, pid, path: moved.append(pid))
    monkeypatch.setattr(cgroup, "of", lambda pid: {1: "/engine/x/below", 2: "/engine/xy"}[pid])
    for pid in (1, 2):
        cgroup.ensure_in("llm", pid, "/user/qgpu-llm", ["/engine/x"])

    assert moved == [2]


def test_processes_of_several_cgroups_are_listed_together(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "mount", lambda: tmp_path)
    for name, pids in (("a", "1\n2\n"), ("b", "3\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text(pids)
        (tmp_path / name / "cgroup.events").write_text("populated 1\n")

    assert cgroup.members("/a", "/gone", "/b") == cgroup.CgroupMembers((1, 2, 3), alive=True)
    assert cgroup.members("/gone") == cgroup.CgroupMembers()
    assert cgroup.members() == cgroup.CgroupMembers()


def test_the_top_of_the_tree_is_never_frozen(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "mount", lambda: tmp_path)
    monkeypatch.setattr(cgroup, "of", lambda pid: "/")

    assert not cgroup.is_frozen(os.getpid())


@pytest.mark.parametrize(("mounts", "found"), [(UNIFIED, "/sys/fs/cgroup"), (HYBRID, "/sys/fs/cgroup/unified")])
def test_the_version_2_tree_is_found(mounts, found):
    assert cgroup.parse_mountinfo(mounts) == Path(found)


def test_a_host_without_version_2_is_refused():
    with pytest.raises(NotSupportedError, match="cgroup v2"):
        cgroup.parse_mountinfo(LEGACY)


def test_a_process_is_placed_by_its_version_2_line():
    text = "9:name=systemd:/init.scope\n4:memory:/elsewhere\n0::/qgpu/web/worker\n"

    assert cgroup.parse_membership(text) == "/qgpu/web/worker"


@pytest.mark.parametrize("name", ["a\x0c0::", "\x1c", "\u2028", "\udcff", " (deleted)"])
def test_a_cgroup_of_an_odd_name_is_told_whole(name):
    assert cgroup.parse_membership(f"0::/qgpu/web/{name}\n") == f"/qgpu/web/{name}"


@pytest.mark.parametrize("name", ["web", "a", "Train-1.b_c", "x" * 63])
def test_plain_names_name_pods(name):
    assert cgroup.path_of(name) == f"/qgpu/{name}"


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "x" * 64, "naïve", "a\n"])
def test_a_name_that_could_escape_the_tree_is_refused(name):
    with pytest.raises(InvalidValueError):
        cgroup.path_of(name)


def writable():
    with contextlib.suppress(Exception):
        return os.access(cgroup.mount(), os.W_OK)
    return False


@pytest.fixture
def name():
    made = f"test-{os.getpid()}"
    yield made
    cgroup.remove(made)


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_children_of_a_pods_process_are_counted_in_the_pod(name):
    cgroup.create(name)
    process = subprocess.Popen(["sh", "-c", "read go; sleep 60 & wait"], stdin=subprocess.PIPE)
    try:
        cgroup.enter(name, process.pid)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        while len(found := cgroup.pids(cgroup.path_of(name))) < 2:
            assert process.poll() is None

        assert process.pid in found
        assert cgroup.of(process.pid) == cgroup.path_of(name)
    finally:
        for pid in cgroup.pids(cgroup.path_of(name)):
            os.kill(pid, 9)
        process.wait()
        while cgroup.pids(cgroup.path_of(name)):
            pass


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_an_empty_pods_cgroup_goes_with_it(name):
    cgroup.create(name)
    cgroup.remove(name)

    assert not (cgroup.mount() / cgroup.path_of(name).lstrip("/")).exists()


@pytest.fixture
def parts(name):
    """A pod's cgroup that its processes may divide, with one process in part "b"."""
    top = cgroup.mount() / cgroup.create(name).lstrip("/")
    (top / "b").mkdir()
    process = subprocess.Popen(["sleep", "60"])
    (top / "b/cgroup.procs").write_text(str(process.pid))
    yield top, process.pid
    process.kill()
    process.wait()


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_cgroups_that_can_have_no_process_hide_none_of_others(parts):
    """A container that may write to its cgroups makes such ones: domains below a cgroup for threads."""
    top, pid = parts
    for at in map(str, range(16)):
        for inner in "tu":
            (top / at / inner).mkdir(parents=True)
        (top / at / "t/cgroup.type").write_text("threaded")
        assert (top / at / "u/cgroup.type").read_text() == "domain invalid\n"

    assert cgroup.pids("/" + str(top.relative_to(cgroup.mount()))) == (pid,)


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_not_more_cgroups_are_read_than_a_pod_should_have(parts, monkeypatch):
    top, _ = parts
    path, read = "/" + str(top.relative_to(cgroup.mount())), []
    for number in range(2000):
        (top / str(number)).mkdir()
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda file, *args: read.append(file) or real(file, *args))

    assert cgroup.members(path).alive
    assert len(read) < 1000
    with pytest.raises(OSError, match="more than"):
        cgroup.pids(path)


@pytest.fixture
def undivided(name, monkeypatch):
    """A pod's cgroup with none below it and one process, as on a host with version 2 alone."""
    monkeypatch.setattr(cgroup, "_is_only_hierarchy", lambda: True)
    monkeypatch.setattr(cgroup, "_SETTLED_NS", 0)
    path = cgroup.create(name)
    process = subprocess.Popen(["sleep", "60"])
    cgroup.enter(name, process.pid)
    yield path, process.pid
    process.kill()
    process.wait()


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_threads_of_a_cgroup_with_none_below_are_listed(undivided):
    path, pid = undivided

    assert cgroup.undivided_threads(path, "/gone") == {pid}


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
@pytest.mark.parametrize("what", ["divided", "version 1", "changed now", "no note"])
def test_cgroup_that_a_thread_may_move_in_is_not_listed(undivided, monkeypatch, what):
    path, _ = undivided
    if what == "divided":
        (cgroup.mount() / path[1:] / "inner").mkdir()
    elif what == "version 1":
        monkeypatch.setattr(cgroup, "_is_only_hierarchy", lambda: False)
    elif what == "changed now":
        monkeypatch.setattr(cgroup, "_SETTLED_NS", 60 * 10**9)
    else:
        cgroup.set_xattr(path, "pod", "")

    assert cgroup.undivided_threads(path) is None


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_thread_without_capabilities_lists_what_others_saw(undivided):
    """Only CAP_SYS_ADMIN shows notes; the guardian's threads for pods have none."""
    path, pid = undivided

    def without() -> set[int] | None:
        capabilities.keep_only(capabilities.CAP_DAC_READ_SEARCH)
        return cgroup.undivided_threads(path)

    with ThreadPoolExecutor(1) as threads:
        before = threads.submit(without).result()
        assert cgroup.keeps_times(path)
        after = threads.submit(without).result()

    assert (before, after) == (None, {pid})


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_cgroup_divided_while_it_is_read_is_not_listed(undivided, monkeypatch):
    path, _ = undivided
    inner, real = cgroup.mount() / path[1:] / "inner", cgroup._content

    def read(file):
        if file.endswith("cgroup.threads"):
            inner.mkdir()
            inner.rmdir()
        return real(file)

    monkeypatch.setattr(cgroup, "_content", read)

    assert cgroup.undivided_threads(path) is None


@pytest.mark.parametrize(
    ("text", "alone"),
    [(b"0::/web\n", True), (b"1:name=systemd:/web\n0::/web\n", False), (b"4:memory:/0::/\n", False)],
)
def test_a_version_1_hierarchy_is_seen_beside_the_tree(monkeypatch, text, alone):
    monkeypatch.setattr(cgroup, "_content", lambda _: text)

    assert cgroup._is_only_hierarchy() is alone


@pytest.mark.parametrize(
    ("directory", "shows"),
    [
        ("/", True),
        ("/sys/fs", True),
        ("/sys/fs/cgroup/unified/a", True),
        ("/sys/fs/cgroup/memory", False),
        ("/a", False),
    ],
)
def test_a_directory_in_or_above_the_tree_shows_it(monkeypatch, directory, shows):
    monkeypatch.setattr(cgroup, "_mountinfo", lambda: HYBRID)

    assert cgroup.shows_tree(directory) is shows


@pytest.mark.parametrize(("mounts", "hybrid"), [(UNIFIED, False), (HYBRID, True), (HYBRID + UNIFIED, False)])
def test_host_with_the_tree_in_its_usual_place_is_no_hybrid(monkeypatch, mounts, hybrid):
    monkeypatch.setattr(cgroup, "_mountinfo", lambda: mounts)

    assert cgroup.is_hybrid() is hybrid


@pytest.mark.parametrize(("mounts", "bounds"), [(UNIFIED, True), (HYBRID, False)])
def test_namespaces_bound_moves_where_the_tree_says_so(monkeypatch, mounts, bounds):
    monkeypatch.setattr(cgroup, "_mountinfo", lambda: mounts)

    assert cgroup.bounds_namespaces() is bounds


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A tree with one cgroup in which, as its files say, somebody is."""
    (tmp_path / "a/inner").mkdir(parents=True)
    (tmp_path / "a/cgroup.procs").write_text("")
    (tmp_path / "a/inner/cgroup.procs").write_text("7\n")
    (tmp_path / "a/cgroup.events").write_text("populated 1\nfrozen 0\n")
    monkeypatch.setattr(cgroup, "mount", lambda: tmp_path)
    return tmp_path


def refusing(monkeypatch, code):
    def refuse(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "open", refuse)


def test_who_is_in_a_cgroup_is_listed(tree):
    assert cgroup.members("/a") == cgroup.CgroupMembers((7,), alive=True)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM, errno.EIO])
def test_a_cgroup_that_cannot_be_looked_at_is_not_empty(monkeypatch, tree, code):
    refusing(monkeypatch, code)

    assert cgroup.members("/a") == cgroup.CgroupMembers((), alive=True)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        cgroup.pids("/a")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENODEV])
def test_a_cgroup_that_is_gone_is_empty(monkeypatch, tree, code):
    refusing(monkeypatch, code)

    assert cgroup.members("/a") == cgroup.CgroupMembers()


def test_a_cgroup_is_empty_when_the_kernel_says_so(tree):
    (tree / "a/inner/cgroup.procs").write_text("")
    assert cgroup.members("/a").alive
    (tree / "a/cgroup.events").write_text("populated 0\nfrozen 0\n")
    assert not cgroup.members("/a").alive


def test_a_cgroup_that_cannot_be_looked_for_is_not_gone(monkeypatch, tree):
    refusing(monkeypatch, errno.EMFILE)

    assert cgroup.find((tree / "a").stat().st_ino, "/a") == "/a"
    with pytest.raises(OSError, match="open files"):
        cgroup.find((tree / "a").stat().st_ino, "/b")


@pytest.fixture
def placed(monkeypatch, tree):
    """This process in a cgroup of the tree, all of which is root's."""
    for directory in (tree / "a", tree / "a/inner"):
        (directory / "cgroup.procs").write_text("")
        for each in (directory, directory / "cgroup.procs"):
            each.chmod(0o755 if each.is_dir() else 0o644)
    said = {"at": "/a/inner"}
    monkeypatch.setattr(cgroup, "of", lambda pid: said["at"])
    return said


def test_a_launchers_own_cgroup_is_its_pods_home(placed):
    assert cgroup.pod_parent(7) == "/a/inner"


@pytest.mark.parametrize("at", ["/", "/../outside", "/..", "/../a/inner"])
def test_launcher_in_root_cgroup_or_outside_puts_pods_at_root(placed, at):
    placed["at"] = at

    assert cgroup.pod_parent(7) == "/"


@pytest.mark.parametrize("file", ["a/inner", "a/inner/cgroup.procs"])
def test_a_cgroup_that_others_may_write_is_no_pods_home(placed, tree, file):
    (tree / file).chmod(0o775)

    assert cgroup.pod_parent(7) == "/a"


@pytest.mark.root
def test_a_cgroup_below_a_users_own_is_no_pods_home(placed, tree):
    os.chown(tree / "a", 1000, 1000)

    assert cgroup.pod_parent(7) == "/"


def test_a_launchers_cgroup_that_is_gone_is_an_error(placed):
    placed["at"] = "/a/gone"

    with pytest.raises(OSError, match="gone"):
        cgroup.pod_parent(7)


def test_whose_cgroup_it_is_shows_in_its_name():
    assert cgroup.is_made_for("web", "/qgpu/web")
    assert cgroup.is_made_for("web", "/job/qgpu-web")
    assert not cgroup.is_made_for("web", "/job/web")
    assert not cgroup.is_made_for("web", "/machine/libpod-web")


@pytest.mark.parametrize(
    "path",
    [
        "/1f2e",
        "/docker/1f2e",
        "/libpod_parent/libpod-1f2e",
        "/machine.slice/libpod-1f2e.scope/container",
        "/system.slice/docker-1f2e.scope",
        "/kubepods.slice/kubepods-pod7.slice/cri-containerd-1f2e.scope",
        "/system.slice/runc:shop:1f2e",
    ],
)
def test_a_containers_cgroup_is_known_by_its_whole_id(path):
    assert cgroup.is_of_container(path, "1f2e")
    for other in ("", "1f2", "f2e", "1", "scope", "f2e.scope", "/"):
        assert not cgroup.is_of_container(path, other)


@pytest.fixture
def too_deep():
    """Cgroups below each other whose paths get longer than a system call takes."""
    top, levels, before = cgroup.mount() / f"deep-{os.getpid()}", 18, os.getcwd()
    top.mkdir()
    os.chdir(top)
    for _ in range(levels):
        os.mkdir("x" * 250)
        os.chdir("x" * 250)
    yield f"/{top.name}"
    for _ in range(levels):
        os.chdir("..")
        os.rmdir("x" * 250)
    os.chdir(before)
    top.rmdir()


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_anothers_too_deep_cgroups_hide_none(too_deep):
    path = cgroup.create(f"t-{os.getpid()}", "/")

    assert cgroup.find(cgroup.id_of(path), "/elsewhere") == path
    assert cgroup.find(1 << 40, "/elsewhere") is None
    cgroup.remove("", path)


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_list_of_processes_without_too_deep_cgroups_fails(too_deep):
    with pytest.raises(OSError, match="name too long"):
        cgroup.pids(too_deep)


@pytest.mark.root
@pytest.mark.skipif(not writable(), reason="no writable cgroup v2 tree here")
def test_a_cgroup_is_found_among_any_number_of_others(parts, monkeypatch):
    top, _ = parts
    inner = top / "b (deleted)/1"
    inner.mkdir(parents=True)
    path = "/" + str(inner.relative_to(cgroup.mount()))
    ident, listed, real = cgroup.id_of(path), [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda at: listed.append(at) or real(at))

    assert cgroup.find(ident, "/elsewhere") == path
    assert cgroup.find(cgroup.id_of("/"), "/elsewhere") == "/"
    inner.rmdir()
    assert cgroup.find(ident, path) is None
    assert listed == []
