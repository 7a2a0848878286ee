"""What the hook needs of a node: the interpreter that runs qgpud, and nothing else."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from qgpu.errors import ExitCode
from qgpu.ipc import wire
from qgpu.runtime import cdi, oci_hook
from tests.ipc.test_wire import full_listener


def test_hook_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(oci_hook.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}

    assert imported <= sys.stdlib_module_names
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_hook_runs_without_environment_and_home(tmp_path: Path) -> None:
    """A runtime starts it so; the daemon is away, so it refuses, in one line."""
    (tmp_path / "config.json").write_text("{}")
    state = {"id": "one", "pid": 1, "bundle": str(tmp_path)}
    command = cdi.hook_entry(tmp_path / "qgpud.sock")["args"]

    result = subprocess.run(
        command, input=json.dumps(state), env={}, cwd="/", capture_output=True, text=True, check=False
    )

    assert result.returncode == 1
    assert "qgpud does not answer" in result.stderr
    assert result.stderr.count("\n") == 1


def answered(directory: Path, *answers: dict[str, Any] | None) -> tuple[int, str, int]:
    """Run the hook against a daemon that answers so, or hangs up; return how it ended, and how much was not asked."""
    (directory / "config.json").write_text("{}")
    path, left = directory / "qgpud.sock", list(answers)
    command = cdi.hook_entry(path)["args"]
    state = json.dumps({"id": "one", "pid": 1, "bundle": str(directory)})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(state)
        process.stdin.close()
        process.stdin = None
        listener = wire.listen(str(path), 0o600)  # later than it asks, perhaps
        listener.settimeout(0.05)
        while process.poll() is None and left:
            try:
                connection = wire.Connection(listener.accept()[0])
            except TimeoutError:
                continue
            connection.sock.settimeout(60)
            answer = left.pop(0)
            with suppress(OSError):  # its time was up meanwhile
                connection.receive()
                if answer is not None:
                    connection.send(answer)
            connection.close()
        _, said = process.communicate()
        listener.close()
    return process.returncode, said, len(left)


GONE = {"ok": False, "code": int(ExitCode.GPU_LOST), "error": "guardian: it has died"}
REFUSED = {"ok": False, "code": int(ExitCode.REFUSED), "error": "30 % is left to grant"}


def test_hook_asks_again_while_daemon_or_guardian_are_replaced(tmp_path: Path) -> None:
    assert answered(tmp_path, None, GONE, GONE, None, {"ok": True}) == (0, "", 0)


def test_hook_does_not_ask_again_what_was_refused(tmp_path: Path) -> None:
    assert answered(tmp_path, GONE, REFUSED, {"ok": True}) == (1, "qgpu: 30 % is left to grant\n", 1)


def test_hook_says_what_was_last_amiss_when_its_time_is_up(tmp_path: Path) -> None:
    code, said, _ = answered(tmp_path, *[GONE] * 1000)

    assert (code, said) == (1, "qgpu: guardian: it has died (tried for 10 s)\n")


def test_hook_waits_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    state = json.dumps({"id": "one", "pid": 1, "bundle": str(tmp_path)})
    answers = [{"ok": True, "name": "one", "waits": "memory"}] * 3 + [{"ok": True, "waits": ""}]
    asked: list[object] = []

    def ask(_path: str, request: dict[str, object], _deadline: float) -> dict[str, object]:
        asked.append(request["op"])
        return answers[len(asked) - 1]

    monkeypatch.setattr(oci_hook, "ask", ask)
    monkeypatch.setattr(oci_hook, "_POLL_S", 0)
    monkeypatch.setattr(sys, "argv", ["oci_hook.py", "qgpud.sock"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(state))
    assert oci_hook.main() == 0
    assert asked == ["container.bind", "pod.waits", "pod.waits", "pod.waits"]

    monkeypatch.setattr(oci_hook, "_ROOM_TIMEOUT_S", -1)
    monkeypatch.setattr(sys, "stdin", io.StringIO(state))
    asked.clear()
    assert oci_hook.main() == 1


def test_hook_tells_own_namespaces_and_what_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("/sys/fs")
    config = {
        "linux": {"namespaces": [{"type": "pid"}, {"type": "cgroup", "path": ""}, {"type": "mount", "path": "/a"}]},
        "mounts": [
            {"type": "bind", "source": "link/..", "destination": "/x"},
            {"type": "cgroup", "source": "cgroup", "destination": "/y"},
            {"destination": "/z"},
        ],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(oci_hook, "ask", lambda _path, request, _deadline: asked.append(request) or {"ok": True})
    monkeypatch.setattr(sys, "argv", ["oci_hook.py", "qgpud.sock"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"id": "one", "pid": 1, "bundle": str(tmp_path)})))

    assert oci_hook.main() == 0
    assert asked[0]["namespaces"] == ["pid", "cgroup"]
    assert asked[0]["mounts"] == [("bind", "/sys"), ("cgroup", str(tmp_path / "cgroup")), ("", str(tmp_path))]


def test_hook_names_the_interpreter_that_runs_the_daemon(tmp_path: Path) -> None:
    """So no node that runs qgpud lacks one, and a virtual environment finds its own."""
    assert cdi.hook_entry(tmp_path)["path"] == sys.executable


def test_hook_tells_a_terminal_nothing_but_what_it_can_print(capsys: pytest.CaptureFixture[str]) -> None:
    """An image's annotations are quoted where they are refused."""
    oci_hook.refuse("annotation qgpu.io/\x1b]0;hello\x07\n: there is no such limit", to_stderr=True)

    assert capsys.readouterr().err == "qgpu: annotation qgpu.io/?]0;hello??: there is no such limit\n"


@pytest.mark.parametrize("config", ['{"annotations": {"run.oci.hooks.stderr": "/etc/profile.d/x.sh"}}', "{", "\x00"])
def test_hook_says_nothing_where_an_image_chose_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str
) -> None:
    """An image can have crun, as root, write stderr to any file; nothing that the image says goes there."""
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setattr(sys, "argv", ["oci_hook.py", str(tmp_path / "qgpud.sock")])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"id": "one", "pid": 1, "bundle": str(tmp_path)})))
    monkeypatch.setattr(oci_hook, "TIMEOUT_S", 0)
    logged: list[str] = []
    monkeypatch.setattr(oci_hook.syslog, "syslog", lambda _, line: logged.append(line))

    assert oci_hook.main() == 1
    assert len(logged) == 1
    assert capsys.readouterr() == ("", "")


def test_hook_waits_for_a_place_in_the_daemons_queue(tmp_path: Path) -> None:
    path, until = tmp_path / "qgpud.sock", time.monotonic() + 60
    with full_listener(path) as listener, ThreadPoolExecutor() as pool:
        asked = pool.submit(oci_hook.ask, str(path), {"op": "status"}, until)
        wait([asked], 0.2)  # it waits by now, or fails
        listener.accept()[0].close()
        with closing(wire.Connection(listener.accept()[0])) as connection:
            connection.receive()
            connection.send({"ok": True})

    assert asked.result() == {"ok": True}


def test_hook_waits_for_a_place_until_its_deadline_only(tmp_path: Path) -> None:
    path = tmp_path / "qgpud.sock"
    with full_listener(path), pytest.raises(TimeoutError):
        oci_hook.ask(str(path), {"op": "status"}, time.monotonic() + 0.05)


def test_hook_reports_the_beginning_of_what_an_image_made_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(oci_hook.syslog, "syslog", lambda _, line: logged.append(line))
    oci_hook.refuse(f"annotation {'x' * 1_000_000}", to_stderr=True)

    assert max(len(logged[0]), len(capsys.readouterr().err)) < 3000
