"""Following qgpud's cards: a daemon that reports a problem, and one that does not answer any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.ipc.control_socket import Server
from qgpu.ipc.systemd import FdStore
from qgpu.k8s.card_watch import CardWatch
from qgpu.k8s.health import HealthStream
from qgpu.k8s.qgpud import Qgpud
from tests.k8s.world import NODE, card, device

UNKNOWN, HEALTHY, UNHEALTHY = range(3)


class Daemon:
    """The control socket of a daemon with one card."""

    def __init__(self, runtime_dir: Path) -> None:
        self.problem = ""
        self._server: Server | None = Server(runtime_dir, 0o600, None, lambda *_: self._status(), FdStore())

    def close(self) -> None:
        """Answer no more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _status(self) -> dict[str, Any]:
        settings = {"policy": "burst-share", "online_policy": "best-effort", "problem": self.problem}
        known = {"index": 0, "uuid": card(0), "name": "card", "memory": 1 << 30}
        return {
            "plane": "sim",
            "driver": None,
            "gpus": [known | settings | {"held_outside": {"cores": 0, "memory": 0}}],
        }


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.close()


class Call:
    """The kubelet's end of a stream."""

    def add_callback(self, _call: object) -> bool:
        return True

    def is_active(self) -> bool:
        return True


def health(cards: CardWatch) -> dict[str, int]:
    """The health that the stream tells first."""
    response = next(HealthStream(cards, NODE).watch(None, Call()))  # type: ignore[arg-type]
    return {each.device.device_name: each.health for each in response.devices}


def test_a_problem_of_a_card_is_told_as_unhealthy(tmp_path: Path, daemon: Daemon) -> None:
    cards = CardWatch(Qgpud(tmp_path))
    cards.poll()
    assert health(cards) == {device(0): HEALTHY}

    daemon.problem = "backend gone"
    before = cards.wait(-1, 0)
    cards.poll()

    assert cards.wait(before, 0) == before + 1
    assert health(cards) == {device(0): UNHEALTHY}


@pytest.mark.parametrize(("grace_s", "told"), [(3600.0, HEALTHY), (-1.0, UNKNOWN)])
def test_silent_daemon_is_unknown_after_the_grace_period(
    tmp_path: Path, daemon: Daemon, grace_s: float, told: int
) -> None:
    cards = CardWatch(Qgpud(tmp_path), grace_s)
    cards.poll()
    daemon.close()
    cards.poll()

    assert health(cards) == {device(0): told}
    assert bool(cards.value.problem) == (told == UNKNOWN)


def test_health_before_the_first_answer_names_no_card(tmp_path: Path) -> None:
    cards = CardWatch(Qgpud(tmp_path))
    cards.poll()

    assert health(cards) == {}
