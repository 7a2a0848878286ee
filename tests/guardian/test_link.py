"""A guardian that does not answer is told from one that is slow."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qgpu.errors import BackendGoneError
from qgpu.guardian.messages import PROTOCOL
from qgpu.sched.seccomp import GuardianHangsError, Link

_ANSWERS = f"""
import os, sys
from qgpu import wire
server = wire.listen(sys.argv[1], 0o600)
print("ready", flush=True)
journal = os.memfd_create("journal")
while True:
    connection = wire.Connection(server.accept()[0])
    while (message := connection.receive()) is not None:
        hello = message[0]["op"] == "hello"
        answer = {{"ok": True, "pid": os.getpid(), "protocol": {PROTOCOL}, "listeners": {{}}}}
        connection.send(answer, [journal] if hello else [])
"""


@pytest.fixture
def answering(tmp_path):
    path = tmp_path / "guardian.sock"
    process = subprocess.Popen([sys.executable, "-c", _ANSWERS, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdout.close()


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def test_a_guardian_that_was_stopped_is_given_up_as_such(answering):
    process, path = answering
    link = Link(path, watch=False)
    link.call("renew")
    _stop(process.pid)
    with pytest.raises(BackendGoneError, match="its process is stopped"):
        link.call("renew")
    with pytest.raises(BackendGoneError, match="over"):
        link.call("renew")
    link.close()


def test_a_stopped_guardian_is_found_to_hang_when_it_is_called_on(answering):
    process, path = answering
    _stop(process.pid)
    with pytest.raises(GuardianHangsError, match=f"process {process.pid}.*its process is stopped"):
        Link(path, watch=False)
