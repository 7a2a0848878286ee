"""The kmod plane's source on a real card: no module is needed for it, and no pods."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from qgpu.daemon.kmod_plane import open_gpu_time
from qgpu.model import NS_PER_S
from qgpu.nvidia import nvml
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import open_devices
from qgpu.planes.kmod.backend import TsgRef
from qgpu.planes.kmod.device import Card

pytestmark = pytest.mark.gpu


@pytest.fixture
def card():
    client = RmClient()
    device = open_devices(client)[0]
    client.close()
    return Card(0, device.pci, 0)


@pytest.fixture
def floods():
    command = [sys.executable, "-m", "qgpu.load.main", "--kernel", "1ms", "--duration", "60s"]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_two_floods_are_metered_as_what_they_are(card, floods):
    source = open_gpu_time(card)
    source.detailed = True
    refs = [TsgRef(ident, 0xC0, ident, (process.pid,)) for ident, process in enumerate(floods, 1)]
    while not all(sample.run_ns for sample in source.read(refs).tsgs.values()):
        assert all(process.poll() is None for process in floods)
        time.sleep(0.1)
    before_ns = time.monotonic_ns()
    source.read(refs)
    time.sleep(1)
    reading = source.read(refs)
    after_ns = time.monotonic_ns()
    lost = source.lost
    source.close()
    shares = {ident: sample.run_ns / (after_ns - before_ns) for ident, sample in reading.tsgs.items()}

    assert lost == 0
    assert shares == pytest.approx({1: 0.48, 2: 0.48}, abs=0.05)
    assert reading.handovers is not None
    assert min(reading.handovers.values()) > 10
    for sample in reading.tsgs.values():
        assert sum(end_ns - start_ns for start_ns, end_ns in sample.runs) == sample.run_ns
        assert before_ns - NS_PER_S < sample.runs[0][0] < sample.runs[-1][1] < after_ns + NS_PER_S / 100


def test_a_card_is_named_and_sized(card):
    (found,) = nvml.describe([(0, card.pci)])

    assert (found.name.startswith("NVIDIA"), found.memory > 1 << 30, found.uuid.startswith("GPU-")) == (True,) * 3
