"""Gates are opened by what the journal says, before there is a guardian again."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from qgpu.errors import NoGpuError
from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.failover import emergency_open
from qgpu.guardian.failover.journal import Journal
from qgpu.nvidia import abi

_CLIENT, _DEVICE, _TSG, _CHANNEL, _COPY_TSG, _COPY_CHANNEL = 7, 2, 3, 4, 5, 6
_OBJECTS = (
    RmObject(_CLIENT, _DEVICE, _CLIENT, abi.NV01_DEVICE_0, 0),
    RmObject(_CLIENT, _TSG, _DEVICE, abi.KEPLER_CHANNEL_GROUP_A, min(abi.GR_ENGINES)),
    RmObject(_CLIENT, _CHANNEL, _TSG, min(abi.GPFIFO_CLASSES)),
    RmObject(_CLIENT, _COPY_TSG, _DEVICE, abi.KEPLER_CHANNEL_GROUP_A, min(abi.COPY_ENGINES)),
    RmObject(_CLIENT, _COPY_CHANNEL, _COPY_TSG, min(abi.GPFIFO_CLASSES)),
)


@pytest.fixture
def journal():
    made = Journal()
    made.append({"fact": "pod", "name": "web", "cgroup": "/web", "grants": {}})
    made.append({"fact": "process", "pid": 1, "pod": "web"})
    made.append({"fact": "client", "client": _CLIENT, "pid": 1, "fd": 3})
    for rm in _OBJECTS:
        made.append(object_fact(rm))
        made.append({"fact": "confirm", "client": rm.client, "handle": rm.handle, "context": 0})
    yield made
    os.close(made.fd)


def test_every_channel_that_the_journal_knows_is_let_on_the_card(monkeypatch, journal):
    moved, closed = [], []
    device = SimpleNamespace(instance=0, set_channels=lambda keys, disabled, preempt: moved.append((keys, disabled)))
    monkeypatch.setattr(emergency_open, "RmClient", lambda: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(emergency_open, "open_devices", lambda client: [device])
    monkeypatch.setattr(emergency_open, "installed", lambda: "580.1")
    emergency_open.open_gates(journal.fd)

    assert moved == [([(_CLIENT, _CHANNEL), (_CLIENT, _COPY_CHANNEL)], False)]
    assert closed


def test_facts_about_memory_alone_are_not_read(journal):
    """A pod can have very many of them, and others wait behind their gates."""
    place = {"pid": 1, "base": 0, "length": 1, "uuid": "00" * 16, "memory": 1}
    whose = {"pod": "web", "instance": 0, "size": 1, "pinned": False}
    before = list(Journal(journal.fd).read(emergency_open._is_of_channels)[1])
    journal.append({"fact": "map"} | place)
    journal.append({"fact": "unmap"} | place)
    journal.append({"fact": "kept", "memory": 1} | whose)
    journal.append({"fact": "managed", "pid": 1, "bytes": 1})
    journal.append(object_fact(RmObject(_CLIENT, 99, 2, abi.NV01_MEMORY_LOCAL_USER, 1)))

    assert list(Journal(journal.fd).read(emergency_open._is_of_channels)[1]) == before
    assert len(before) == 3 + 2 * len(_OBJECTS)


def test_failed_emergency_open_does_not_stop_guardian_start(monkeypatch, journal):
    def refuse() -> None:
        raise NoGpuError("no card")

    monkeypatch.setattr(emergency_open, "RmClient", refuse)

    emergency_open.open_gates(journal.fd)
