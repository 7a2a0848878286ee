"""Utilisation as NVML tells it: what is asked when, and what becomes of a card that does not answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qgpu.errors import NoGpuError
from qgpu.nvidia import nvml


class FakeNvml:
    """NVML with one card, whose driver may go away."""

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self) -> None:
        self.used: int | None = 40
        self.open = self.asked = 0

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's name)
        """Count who has it open."""
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Count who closes it."""
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        """Find the card."""
        return uuid

    def nvmlDeviceGetUtilizationRates(self, card: object) -> SimpleNamespace:  # noqa: N802
        """Tell, if the driver is there."""
        self.asked += 1
        if self.used is None:
            raise self.NVMLError
        return SimpleNamespace(gpu=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, card: object) -> list[SimpleNamespace]:  # noqa: N802
        """Tell who computes, if the driver is there."""
        if self.used is None:
            raise self.NVMLError
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: object) -> list[SimpleNamespace]:  # noqa: N802
        """Tell who draws."""
        return [SimpleNamespace(pid=8), SimpleNamespace(pid=9)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Put NVML's place in."""
    fake, now_ns = FakeNvml(), [10**9]
    monkeypatch.setattr(nvml, "pynvml", fake)

    def later() -> int:
        now_ns[0] += 60_000_000
        return now_ns[0]

    monkeypatch.setattr(nvml, "time", SimpleNamespace(monotonic_ns=later))
    return fake


def test_utilisation_is_asked_ten_times_a_second_at_most(fake: FakeNvml) -> None:
    card = nvml.Utilization("GPU-1")

    assert [card.read() for _ in range(4)] == [0.4] * 4
    assert fake.asked == 2


def test_a_silent_card_tells_nothing_and_leaks_nothing(fake: FakeNvml) -> None:
    card = nvml.Utilization("GPU-1")
    fake.used = None
    told = [card.read() for _ in range(6)]
    fake.used = 70

    assert told == [None] * 6
    assert fake.open == 0
    assert [card.read() for _ in range(2)][-1] == 0.7
    card.close()
    assert fake.open == 0


def test_processes_on_a_card_compute_or_draw(fake: FakeNvml) -> None:
    assert nvml.processes("GPU-1") == {7, 8, 9}
    assert fake.open == 0


def test_a_card_that_does_not_tell_of_processes_says_so(fake: FakeNvml) -> None:
    fake.used = None

    with pytest.raises(NoGpuError):
        nvml.processes("GPU-1")
