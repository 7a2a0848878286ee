"""The record of changes on disk: bounded, whole after a crash, and as before after a failure."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from qgpu.changes import who
from qgpu.daemon import caller, events
from qgpu.daemon.events import Events
from qgpu.daemon.request_args import Arguments
from qgpu.errors import QgpuError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session

#: Who makes the changes.
BY = {"uid": 7, "pid": 8}


@pytest.fixture
def me() -> Session:
    return Session(
        wire.Peer(os.getpid(), os.getuid(), os.getgid()), may_change=True, process=os.pidfd_open(os.getpid())
    )


def names(record: Events, me: Session, count: int = 1000) -> list[str]:
    return [event["name"] for event in record.listed(me, Arguments({"count": count}), [])["events"]]


def test_the_record_is_bounded_and_keeps_the_latest(
    tmp_path: Path, me: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FULL", 10)
    record = Events(tmp_path)
    for number in range(35):
        record.happened(me, "pod created", {"name": str(number)})

    lines = [len(file.read_text().splitlines()) for file in tmp_path.iterdir()]
    assert sum(lines) <= 20
    assert names(Events(tmp_path), me, 10) == [str(number) for number in range(25, 35)]


def test_half_a_line_left_by_a_crash_costs_only_that_event(tmp_path: Path, me: Session) -> None:
    Events(tmp_path).happened(me, "pod created", {"name": "one"})
    with (tmp_path / "events-of-pods.jsonl").open("a") as file:
        file.write('{"what": "pod cre')
    record = Events(tmp_path)
    record.happened(me, "pod created", {"name": "two"})

    assert names(Events(tmp_path), me) == ["one", "two"]


def test_a_change_that_fails_is_recorded_as_failed(tmp_path: Path, me: Session) -> None:
    record = Events(tmp_path)
    with (
        pytest.raises(QgpuError, match="broken"),
        record.changing(BY, "pod set", {"name": "one"}, {"cores": 1}, {"cores": 2}),
    ):
        raise QgpuError("broken")
    planned, failed = record.listed(me, Arguments({}), [])["events"]

    assert "failed" not in planned
    assert failed["failed"] == "broken"


def test_a_process_that_has_ended_is_named_by_user_and_pid_only(me: Session) -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    session = Session(wire.Peer(child, 7, 7), may_change=True, process=os.pidfd_open(child))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

    assert events.caller.of(session) == {"uid": 7, "pid": child}
    os.waitpid(child, 0)
    assert events.caller.of(me)["program"]


@pytest.mark.parametrize(
    ("name", "words", "module"),
    [
        ("python3", ("python3", "-m", "qgpu.groups.keeper", "--token", "secret"), "qgpu.groups.keeper"),
        ("python3", ("/usr/bin/python3.11", "-IBu", "-m", "qgpu.cli.main"), "qgpu.cli.main"),
        ("python3", ("python3", "-c", "pass", "-m", "qgpu.cli.main"), ""),
        ("python3", ("python3", "train.py", "-m", "qgpu.cli.main"), ""),
        ("python3", ("python3", "-m"), ""),
        ("python3", ("python3", "-m", "a\x1b[2Jb"), ""),
        ("python3", ("python3", "-m", "a" * 81), ""),
        ("python3", ("sh", "-m", "qgpu.cli.main"), ""),
        ("python3", (), ""),
        ("train", ("python3", "-m", "qgpu.cli.main"), ""),
    ],
)
def test_a_pythons_module_is_named_where_it_is_plain(
    me: Session, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...], module: str
) -> None:
    monkeypatch.setattr(caller.proc, "name", lambda pid: name)
    monkeypatch.setattr(caller.proc, "cmdline", lambda pid: [word.encode() for word in words])
    found = caller.of(me)

    assert (found["program"], found.get("module", "")) == (name, module)
    assert who(found).endswith(f"{name}{module and f' -m {module}'}[{os.getpid()}]")


def test_pods_that_come_and_go_displace_no_settings(
    tmp_path: Path, me: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FULL", 10)
    record = Events(tmp_path)
    with record.changing(BY, "policy set", {"name": "kept"}, {"cores": 1}, {"cores": 2}):
        pass
    for number in range(50):
        record.happened(me, "pod created", {"name": str(number)})
    settings = Events(tmp_path).listed(me, Arguments({"settings": True}), [])["events"]

    assert [event["name"] for event in settings] == ["kept"]


def test_events_of_pods_wait_for_room_on_the_disk(tmp_path: Path, me: Session) -> None:
    file = tmp_path / "events-of-pods.jsonl"
    file.symlink_to("/dev/full")
    record = Events(tmp_path)
    with capture_logs() as logs:
        record.happened(me, "pod created", {"name": "one"})
        record.happened(me, "pod created", {"name": "two"})
    meanwhile = names(record, me)
    file.unlink()
    record.happened(me, "pod created", {"name": "three"})

    assert meanwhile == ["one", "two"]
    assert names(Events(tmp_path), me) == ["one", "two", "three"]
    assert [line["event"] for line in logs] == ["events not written, trying again with the next", *["pod created"] * 2]


def test_events_that_wait_are_written_at_the_end(tmp_path: Path, me: Session) -> None:
    file = tmp_path / "events-of-pods.jsonl"
    file.symlink_to("/dev/full")
    record = Events(tmp_path)
    record.happened(me, "pod created", {"name": "one"})
    file.unlink()
    record.close()

    assert names(Events(tmp_path), me) == ["one"]


def test_a_refused_change_displaces_nothing_that_waits(
    tmp_path: Path, me: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FULL", 2)
    file = tmp_path / "events.jsonl"
    file.symlink_to("/dev/full")
    record = Events(tmp_path)
    for name in ("one", "two"):
        record.noted("policy set", {"name": name}, BY, {"cores": 1}, {"cores": 2})
    for _ in range(2):
        with pytest.raises(QgpuError), record.changing(BY, "pod set", {"name": "no"}, {"cores": 1}, {"cores": 2}):
            pass
    file.unlink()
    record.close()

    assert names(Events(tmp_path), me, 2) == ["one", "two"]


def test_a_clock_that_is_set_back_hides_no_event(tmp_path: Path, me: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Events(tmp_path)
    record.happened(me, "pod created", {"name": "before"})
    now = datetime.now(UTC)
    monkeypatch.setattr(events, "datetime", SimpleNamespace(now=lambda _: now - timedelta(hours=1)))
    with record.changing(BY, "policy set", {"name": "after"}, {"cores": 1}, {"cores": 2}):
        pass

    assert names(record, me, 1) == ["after"]
    again = Events(tmp_path)
    again.happened(me, "pod removed", {"name": "last"})
    assert names(again, me) == ["before", "after", "last"]


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space there"), (errno.EROFS, "qgpud must be able to write there")]
)
def test_a_change_that_is_not_recorded_says_what_to_do(
    tmp_path: Path, me: Session, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    record = Events(tmp_path)
    monkeypatch.setattr(events, "_write", refuse)
    with pytest.raises(QgpuError, match=remedy), record.changing(BY, "pod set", {}, {"cores": 1}, {"cores": 2}):
        pass

    assert names(record, me) == []


def test_a_pods_origin_is_that_of_the_last_of_its_name(tmp_path: Path, me: Session) -> None:
    record = Events(tmp_path)
    record.happened(me, "pod created", {"name": "one", "made": True})
    record.happened(me, "pod removed", {"name": "one"})
    record.happened(me, "pod created", {"name": "one", "made": True})
    record.happened(me, "container bound", {"name": "one"})
    record.happened(me, "claim dropped", {"name": "one", "uid": "7"})
    _, _, made, *_ = record.listed(me, Arguments({}), [])["events"]
    origin = Events(tmp_path).origins()["one"]

    assert (origin.at, origin.by) == (made["at"], made["by"])
    assert origin.untouched_since_s == datetime.fromisoformat(made["at"]).timestamp()


@pytest.mark.parametrize("what", ["pod told to move", "pod yields its memory"])
def test_since_when_a_moved_pod_runs_is_not_known(me: Session, what: str) -> None:
    record = Events(None)
    record.happened(me, "pod created", {"name": "one", "made": True})
    record.happened(me, what, {"name": "one"})
    origin = record.origins()["one"]

    assert origin.at is not None
    assert origin.untouched_since_s is None


def test_a_pod_that_was_joined_only_has_no_known_origin(me: Session) -> None:
    record = Events(None)
    record.happened(me, "container bound", {"name": "one"})

    assert record.origins() == {}


def test_a_full_record_that_somebody_removed_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "FULL", 2)
    record = Events(tmp_path)
    for cores in range(4):
        if cores == 2:
            (tmp_path / "events.jsonl").unlink()
        with record.changing(BY, "pod set", {}, {"cores": cores}, {"cores": cores + 1}):
            pass

    assert (tmp_path / "events.jsonl").exists()
