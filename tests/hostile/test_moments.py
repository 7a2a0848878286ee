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

from tests.hostile.stage import Stage

MOMENTS = int(os.environ.get("QGPU_MOMENTS", "15"))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, pods=2)
    if not made.there:
        made.close()
        pytest.skip("no cgroup2 tree can be mounted here")
    yield made
    made.close()


def both_killed(stage: Stage) -> None:
    """The one in reserve takes their place: pods go on before there is a daemon again."""
    stage.standby()
    os.kill(stage.guardian(), signal.SIGKILL)
    stage.daemon.kill()
    stage.go_on()
    stage.restart()


def all_killed(stage: Stage) -> None:
    for pid in (stage.standby(), stage.guardian()):
        os.kill(pid, signal.SIGKILL)
    stage.daemon.kill()
    stage.restart()


def both_killed_and_nothing_kept(stage: Stage) -> None:
    """No service manager is there: the next daemon may come before the one in reserve has begun."""
    stage.standby()
    os.kill(stage.guardian(), signal.SIGKILL)
    time.sleep(stage.random.random() * 0.1)
    stage.daemon.kill()
    stage.forget()
    stage.restart()


def guardian_and_its_daemon_killed(stage: Stage) -> None:
    """The daemon while it starts another guardian, which has no pods yet."""
    _killed_in_mid_change(stage)
    stage.restart()


def guardian_and_its_daemon_killed_and_nothing_kept(stage: Stage) -> None:
    """The same without a service manager: whoever starts a daemon then has no descriptor of the last one's."""
    _killed_in_mid_change(stage)
    stage.forget()
    stage.restart()


def _killed_in_mid_change(stage: Stage) -> None:
    standby = psutil.Process(stage.standby())
    os.kill(stage.guardian(), signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):  # the last daemon's was first
        stage.until(lambda: standby.name() == "qgpu-guardian", "the next begins")
    time.sleep(stage.random.random() * 0.2)
    stage.daemon.kill()


def guardian_killed(stage: Stage) -> None:
    os.kill(stage.guardian(), signal.SIGKILL)


def guardian_stopped(stage: Stage) -> None:
    os.kill(stage.guardian(), signal.SIGSTOP)


def guardian_hangs(stage: Stage) -> None:
    stage.freeze(stage.guardian())
    stage.go_on()
    stage.thaw()


def daemon_hangs(stage: Stage) -> None:
    stage.freeze(stage.daemon.pid)
    stage.go_on()
    stage.thaw()


def guardian_stopped_and_daemon_killed(stage: Stage) -> None:
    os.kill(stage.guardian(), signal.SIGSTOP)
    daemon_killed(stage)


def daemon_killed(stage: Stage) -> None:
    stage.daemon.kill()
    stage.restart()


def daemon_ended(stage: Stage) -> None:
    """As when it is restarted or upgraded."""
    stage.daemon.terminate()
    stage.restart()


def daemon_stopped(stage: Stage) -> None:
    stage.daemon.send_signal(signal.SIGSTOP)
    stage.go_on()
    stage.daemon.send_signal(signal.SIGCONT)


def reserve_killed(stage: Stage) -> None:
    os.kill(stage.standby(), signal.SIGKILL)
    guardian_killed(stage)


def launcher_stopped(stage: Stage) -> None:
    launcher = next(iter(stage.pods.values()))
    launcher.send_signal(signal.SIGSTOP)
    stage.go_on()
    launcher.send_signal(signal.SIGCONT)


WHAT: list[Callable[[Stage], None]] = [
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


def test_no_pod_lost_and_nothing_left_at_any_failure_moment(stage):
    random = stage.random = Random(MOMENTS)
    before = _at_rest(stage)
    longest: dict[str, list[float]] = {each.__name__: [] for each in WHAT}
    for number in range(MOMENTS):
        what = WHAT[number % len(WHAT)]
        time.sleep(random.random() * 0.3)
        print(number, what.__name__, flush=True)
        at = time.monotonic()
        what(stage)
        stage.go_on()
        longest[what.__name__].append(round(stage.longest_wait(at), 2))
    print(longest)

    rest = _at_rest(stage)
    for _ in range(5):  # a connection that is just being closed is nothing that was left
        if rest == before:
            break
        stage.go_on()
        rest = stage.rest()
    assert rest == before


def _at_rest(stage: Stage) -> dict[str, int]:
    """Count what there is once the daemon has taken over what is kept for the next one: that it has twice."""
    for _ in range(2):
        both_killed(stage)
        stage.go_on()
    return stage.rest()
