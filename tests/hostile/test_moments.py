"""Daemon, guardian and launcher killed, stopped, ended at moments drawn by lot, under pods that always allocate.

Real processes and filters, on an emulated driver. ``QGPU_MOMENTS=200`` tries that many (15 by default).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.hostile.emulated_host import EmulatedHost

MOMENTS = int(os.environ.get("QGPU_MOMENTS", "15"))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EmulatedHost]:
    made = EmulatedHost(tmp_path, pods=2)
    if not made.there:
        made.close()
        pytest.skip("no cgroup2 tree can be mounted here")
    yield made
    made.close()


def both_killed(host: EmulatedHost) -> None:
    """The one in reserve takes their place: pods go on before there is a daemon again."""
    host.standby()
    os.kill(host.guardian(), signal.SIGKILL)
    host.daemon.kill()
    host.go_on()
    host.restart()


def all_killed(host: EmulatedHost) -> None:
    for pid in (host.standby(), host.guardian()):
        os.kill(pid, signal.SIGKILL)
    host.daemon.kill()
    host.restart()


def both_killed_and_nothing_kept(host: EmulatedHost) -> None:
    """No service manager is there: the next daemon may come before the one in reserve has begun."""
    host.standby()
    os.kill(host.guardian(), signal.SIGKILL)
    time.sleep(host.random.random() * 0.1)
    host.daemon.kill()
    host.forget()
    host.restart()


def guardian_and_its_daemon_killed(host: EmulatedHost) -> None:
    """The daemon while it starts another guardian, which has no pods yet."""
    _killed_in_mid_change(host)
    host.restart()


def guardian_and_its_daemon_killed_and_nothing_kept(host: EmulatedHost) -> None:
    """The same without a service manager: whoever starts a daemon then has no descriptor of the last one's."""
    _killed_in_mid_change(host)
    host.forget()
    host.restart()


def _killed_in_mid_change(host: EmulatedHost) -> None:
    standby = psutil.Process(host.standby())
    os.kill(host.guardian(), signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):  # the last daemon's was first
        host.until(lambda: standby.name() == "qgpu-guardian", "the next begins")
    time.sleep(host.random.random() * 0.2)
    host.daemon.kill()


def guardian_killed(host: EmulatedHost) -> None:
    os.kill(host.guardian(), signal.SIGKILL)


def guardian_stopped(host: EmulatedHost) -> None:
    os.kill(host.guardian(), signal.SIGSTOP)


def guardian_hangs(host: EmulatedHost) -> None:
    host.freeze(host.guardian())
    host.go_on()
    host.thaw()


def daemon_hangs(host: EmulatedHost) -> None:
    host.freeze(host.daemon.pid)
    host.go_on()
    host.thaw()


def guardian_stopped_and_daemon_killed(host: EmulatedHost) -> None:
    os.kill(host.guardian(), signal.SIGSTOP)
    daemon_killed(host)


def daemon_killed(host: EmulatedHost) -> None:
    host.daemon.kill()
    host.restart()


def daemon_ended(host: EmulatedHost) -> None:
    """As when it is restarted or upgraded."""
    host.daemon.terminate()
    host.restart()


def daemon_stopped(host: EmulatedHost) -> None:
    host.daemon.send_signal(signal.SIGSTOP)
    host.go_on()
    host.daemon.send_signal(signal.SIGCONT)


def reserve_killed(host: EmulatedHost) -> None:
    os.kill(host.standby(), signal.SIGKILL)
    guardian_killed(host)


def launcher_stopped(host: EmulatedHost) -> None:
    launcher = next(iter(host.pods.values()))
    launcher.send_signal(signal.SIGSTOP)
    host.go_on()
    launcher.send_signal(signal.SIGCONT)


WHAT: list[Callable[[EmulatedHost], None]] = [
    both_killed,
    all_killed,
    both_killed_and_nothing_kept,
    guardian_and_its_daemon_killed,
    guardian_and_its_daemon_killed_and_nothing_kept,
    guardian_killed,
    guardian_stopped,
    guardian_stopped_and_daemon_killed,
    guardian_hangs,
    daemon_hangs,
    daemon_killed,
    daemon_ended,
    daemon_stopped,
    reserve_killed,
    launcher_stopped,
]


def test_no_pod_lost_and_nothing_left_at_any_failure_moment(host):
    random = host.random = Random(MOMENTS)
    before = _at_rest(host)
    longest: dict[str, list[float]] = {each.__name__: [] for each in WHAT}
    for number in range(MOMENTS):
        what = WHAT[number % len(WHAT)]
        time.sleep(random.random() * 0.3)
        print(number, what.__name__, flush=True)
        at = time.monotonic()
        what(host)
        host.go_on()
        longest[what.__name__].append(round(host.longest_wait(at), 2))
    print(longest)

    rest = _at_rest(host)
    for _ in range(5):  # a connection that is just being closed is nothing that was left
        if rest == before:
            break
        host.go_on()
        rest = host.rest()
    assert rest == before


def _at_rest(host: EmulatedHost) -> dict[str, int]:
    """Count what there is once the daemon has taken over what is kept for the next one: that it has twice."""
    for _ in range(2):
        both_killed(host)
        host.go_on()
    return host.rest()
