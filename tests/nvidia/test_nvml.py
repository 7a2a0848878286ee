"""What NVML tells: utilisation, processes, and the cards that MIG divides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qgpu.errors import NoGpuError, NotSupportedError
from qgpu.model.plane_api import ExcludedCard, MigInstance, Pgpu
from qgpu.nvidia import nvml


class FakeNvml:
    """NVML with one card, whose driver may go away; ``mig`` has the mode of each card there is, None if it has none.

    ``instances`` has (GPU instance, compute instance) at each place of a card; None where there is none.
    """

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self) -> None:
        self.used: int | None = 40
        self.open = self.asked = 0
        self.mig: list[int | None] = []
        self.instances: dict[int, list[tuple[int, int] | None]] = {}

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

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Count the cards."""
        return len(self.mig)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """Find a card by its number."""
        return index

    def nvmlDeviceGetMigMode(self, card: int) -> tuple[int, int]:  # noqa: N802
        """Tell the mode now and after the next reset."""
        if (mode := self.mig[card]) is None:
            raise self.NVMLError
        return mode, 0

    def nvmlDeviceGetPciInfo(self, card: int) -> SimpleNamespace:  # noqa: N802
        """Tell the address as NVML writes it."""
        return SimpleNamespace(busId=f"00000000:{0x3A + card:02X}:00.0".encode())

    def nvmlDeviceGetUUID(self, which: int | tuple[int, int]) -> str:  # noqa: N802
        """Tell the UUID of a card or an instance."""
        return f"GPU-{which}" if isinstance(which, int) else f"MIG-{which[0]}-{which[1]}"

    def nvmlDeviceGetName(self, instance: tuple[int, int]) -> str:  # noqa: N802
        """Tell the profile with the name."""
        return "NVIDIA H200 MIG 1g.18gb"

    def nvmlDeviceGetMemoryInfo(self, instance: tuple[int, int]) -> SimpleNamespace:  # noqa: N802
        """Tell the GPU instance's memory."""
        return SimpleNamespace(total=instance[0] << 30)

    def nvmlDeviceGetMinorNumber(self, card: int) -> int:  # noqa: N802
        """Tell the N of /dev/nvidiaN; instances have none."""
        return card + 4

    def nvmlDeviceGetMaxMigDeviceCount(self, card: int) -> int:  # noqa: N802
        """Count the places for instances."""
        return len(self.instances[card])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: int, place: int) -> tuple[int, int]:  # noqa: N802
        """Find an instance by its place."""
        if (found := self.instances[card][place]) is None:
            raise self.NVMLError
        return found

    def nvmlDeviceGetGpuInstanceId(self, instance: tuple[int, int]) -> int:  # noqa: N802
        """Tell its GPU instance."""
        return instance[0]

    def nvmlDeviceGetComputeInstanceId(self, instance: tuple[int, int]) -> int:  # noqa: N802
        """Tell its number in that."""
        return instance[1]


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


def test_a_card_in_mig_mode_is_left_out_of_the_others(fake: FakeNvml) -> None:
    fake.mig = [None, 1, 0]

    assert nvml.cards_in_mig_mode() == [
        ExcludedCard(1, "00000000:3b:00.0", "MIG mode is on; to share it: nvidia-smi -i 1 -mig 0")
    ]
    assert fake.open == 0


@pytest.mark.parametrize("mig", [[], [None, None], [0, 0]])
def test_without_mig_no_card_is_left_out(fake: FakeNvml, mig: list[int | None]) -> None:
    fake.mig = mig

    assert nvml.cards_in_mig_mode() == []


@pytest.mark.parametrize("card", [1, "GPU-1"])
def test_instances_of_a_card_to_be_shared_are_pgpus(fake: FakeNvml, card: int | str) -> None:
    fake.mig, fake.instances = [1, 1, 0], {1: [(3, 0), None, (11, 0)]}

    excluded, instances, _ = nvml.mig_cards({card})

    assert [each.index for each in excluded] == [0]
    assert instances == [
        Pgpu(203, "MIG-3-0", "NVIDIA H200 MIG 1g.18gb", 3 << 30, 5, MigInstance(1, 3, 0)),
        Pgpu(211, "MIG-11-0", "NVIDIA H200 MIG 1g.18gb", 11 << 30, 5, MigInstance(1, 11, 0)),
    ]
    assert fake.open == 0


def test_cards_that_a_driver_moves_between_are_whole(fake: FakeNvml) -> None:
    fake.mig = [None, 1, 0]
    assert nvml.whole_cards() == ["GPU-0", "GPU-2"]
    assert fake.open == 0


def test_compute_instances_with_one_memory_are_left_alone(fake: FakeNvml) -> None:
    fake.mig, fake.instances = [1], {0: [(1, 0), (1, 1), (2, 0)]}

    excluded, instances, _ = nvml.mig_cards({0})

    assert [each.why for each in excluded] == [
        "GPU instance 1 has 2 compute instances with one memory; qgpu shares those with one"
    ]
    assert [each.index for each in instances] == [102]


def test_host_of_shared_cards_without_instances_is_refused(fake: FakeNvml) -> None:
    fake.mig, fake.instances = [1], {0: [None, None]}

    with pytest.raises(NotSupportedError, match="GPU 0: MIG mode is on, and it has no compute instance"):
        nvml.mig_cards({0})


def test_a_host_of_mig_cards_alone_is_refused_by_name(fake: FakeNvml) -> None:
    fake.mig = [1, 1]

    with pytest.raises(NotSupportedError, match=r"every GPU here.*nvidia-smi -i 0 -mig 0"):
        nvml.cards_in_mig_mode()
    assert fake.open == 0
