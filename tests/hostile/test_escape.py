"""A pod that attacks the guardian stops nobody and ends no guardian; bench/escape.py says how long others wait."""

from __future__ import annotations

import os

import pytest

from tests.hostile.attacker import ATTACKS
from tests.hostile.emulated_host import EmulatedHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    made = EmulatedHost(tmp_path_factory.mktemp("host"), 2)
    if not made.there:
        pytest.skip("no cgroup2 tree can be mounted here")
    yield made
    made.close()


def _lost(host):
    """Return the daemon's lines about lost guardians."""
    return [line for line in (host.directory / "qgpud.log").read_text().split("\n") if "guardian lost" in line]


@pytest.mark.parametrize("attack", ATTACKS)
def test_neighbours_go_on_beside_an_attack_on_the_guardian(host, attack):
    before = len(_lost(host))
    attacker = host.start_attacker(attack)
    host.until(lambda: host.has_attacked(attack), f"{attack} is done")
    host.go_on()
    alive = attacker.poll() is None
    attacker.terminate()
    attacker.wait()
    host.go_on()

    assert alive, host.said(f"host-{os.getpid()}-{attack}").read_text()
    lost = _lost(host)[before:]
    assert len(lost) <= 1, lost  # on a host this busy one may be taken to hang for other reasons
