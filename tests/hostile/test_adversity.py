"""What a host does to daemon and guardian, but no pod: files removed, no descriptors left, memory damaged."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.hostile import emulated
from tests.hostile.emulated_host import EmulatedHost
from tests.hostile.test_moments import both_killed, daemon_killed, guardian_killed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], EmulatedHost]]:
    """The host that there is, or another one where a test has left it with a pod that has ended."""
    made: list[EmulatedHost] = []

    def intact() -> EmulatedHost:
        if made and any(pod.poll() is not None for pod in made[0].pods.values()):
            made.pop().close()
        if not made:
            made.append(EmulatedHost(tmp_path_factory.mktemp("host"), pods=2))
        return made[0]

    yield intact
    for each in made:
        each.close()


@pytest.fixture
def host(hosts: Callable[[], EmulatedHost]) -> EmulatedHost:
    """The host, with a daemon and a guardian to which nothing has been done yet."""
    found = hosts()
    if not found.there:
        pytest.skip("no cgroup2 tree can be mounted here")
    both_killed(found)
    found.go_on()
    return found


def test_pods_go_on_when_the_runtime_directory_is_removed(host):
    for then in (guardian_killed, daemon_killed, both_killed):
        shutil.rmtree(host.runtime_dir)
        host.go_on()
        host.until((host.runtime_dir / "guardian.sock").exists, "the guardian can be found again")
        then(host)
        host.go_on()


def test_guardian_out_of_fds_serves_its_pods_and_takes_no_more(host):
    guardian = psutil.Process(host.guardian())
    with _limited(guardian.pid, _held_long(guardian.pid) + 4):
        host.go_on()
        with pytest.raises(AssertionError, match="it cannot be served"):
            _start_more(host)
        host.pods.popitem()
        host.go_on()

    assert host.guardian() == guardian.pid


def test_a_daemon_without_descriptors_leaves_the_guardian_alone(host):
    guardian, daemon = host.guardian(), psutil.Process(host.daemon.pid)
    with _limited(daemon.pid, daemon.num_fds()):
        daemon.send_signal(signal.SIGSTOP)  # its lease lapses, and its connections may be over when it looks again
        time.sleep(2.5)
        daemon.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        host.go_on()

    assert host.guardian() == guardian


def test_a_journal_that_was_damaged_costs_no_pod(host):
    journal = host.manager.stored["journal"]
    data = os.pread(journal, 1 << 24, 0)
    line = data.index(b'{"fact":"gone"')
    os.pwrite(journal, b"\0\xff{{", line)
    guardian_killed(host)

    assert host.go_on() < 60


def test_a_full_disk_costs_lines_of_the_log_and_no_pod(host):
    log = host.runtime_dir / "guardian.log"
    log.unlink()
    log.symlink_to("/dev/full")
    for what in (both_killed, daemon_killed, guardian_killed):
        what(host)
        host.go_on()
    guardian = host.guardian()
    daemon_killed(host)
    host.go_on()

    assert host.guardian() == guardian


def test_a_pod_outlives_its_launcher(host):
    name, launcher = host.pods.popitem()
    launcher.kill()
    launcher.wait()
    killed = time.monotonic()
    host.until(lambda: sum(at > killed for at in host.times(name)) > 3, "it goes on")
    guardian_killed(host)
    daemon_killed(host)
    after = time.monotonic()
    host.until(lambda: sum(at > after for at in host.times(name)) > 3, "it still goes on")

    assert name in [pod["name"] for pod in host.listed()]


def _start_more(host: EmulatedHost) -> None:
    for client in emulated.CLIENTS[2:]:
        host.start_pod(client)


def _held_long(pid: int) -> int:
    """Return how many descriptors a guardian has, without those of a moment and of its sets of files."""
    found = []
    for _ in range(200):
        time.sleep(0.01)
        found.append(sum(int(path.name) < 1000 for path in Path(f"/proc/{pid}/fd").iterdir()))
    return min(found)


@contextmanager
def _limited(pid: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
