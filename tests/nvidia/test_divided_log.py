"""The context switches of a divided card, by MIG instance: engines that run at once do not end each other's turns."""

from __future__ import annotations

from types import SimpleNamespace

from qgpu.model.plane_api import MigInstance
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.ctxsw_log import END, START, ContextSwitch, DividedLog
from qgpu.nvidia.gpu_time_reader import GpuTimeReader

ONE, TWO = MigInstance(0, 1, 0), MigInstance(0, 2, 3)


def ids(instance: MigInstance) -> int:
    """Return what a record carries of an instance: the last four bytes before its time."""
    record = ffi.new("NV_EVENT_BUFFER_FECS_RECORD *")
    record.migGpuInstanceId, record.migComputeInstanceId = instance.gpu_instance, instance.compute_instance
    last = ffi.offsetof("NV_EVENT_BUFFER_FECS_RECORD", "timestamp")
    return int.from_bytes(bytes(ffi.buffer(record))[last - 4 : last], "little")


class Card:
    """A card's log, and its clock at the last record."""

    dropped = 5

    def __init__(self, *switches: ContextSwitch) -> None:
        self.new = list(switches)
        self.now_ns = max(each.at_ns for each in switches)

    def read(self) -> list[ContextSwitch]:
        """Return each record once."""
        new, self.new = self.new, []
        return new

    def time_ns(self) -> int:
        """Read the clock."""
        return self.now_ns


def test_time_of_each_instance_is_counted_on_its_own() -> None:
    card = Card(
        ContextSwitch(1000, START, 7, 70, ids(ONE)),
        ContextSwitch(1500, START, 8, 80, ids(TWO)),
        ContextSwitch(2000, START, 9, 90, ids(TWO)),
        ContextSwitch(2500, START, 5, 50, ids(MigInstance(0, 3, 0))),
        ContextSwitch(3000, END, 7, 70, ids(ONE)),
        ContextSwitch(4000, END, 9, 90, ids(TWO)),
    )
    log = DividedLog(card)
    used = []
    for reader in [GpuTimeReader(card, log.of(each)) for each in (ONE, TWO)]:  # type: ignore[arg-type]
        reader.drain()
        used.append({who: use.run_ns for who, use in reader.counter.totals.items()})

    assert used == [{(7, 70): 2000}, {(8, 80): 500, (9, 90): 2000}]


def test_records_wait_for_the_instance_that_reads_later() -> None:
    log = DividedLog(Card(ContextSwitch(1, START, 7, 70, ids(ONE)), ContextSwitch(2, START, 8, 80, ids(TWO))))
    one, two = log.of(ONE), log.of(TWO)

    assert [[each.context for each in part.read()] for part in (one, one, two, two)] == [[7], [], [8], []]
    assert (one.dropped, two.dropped) == (5, 5)


def test_whole_card_counts_whatever_ids_its_records_have() -> None:
    card = Card(ContextSwitch(1000, START, 7, 70, 0xFFFF0000), ContextSwitch(3000, END, 7, 70, 0xFFFF0000))
    reader = GpuTimeReader(card, SimpleNamespace(dropped=0, read=card.read))  # type: ignore[arg-type]
    reader.drain()

    assert reader.counter.totals[7, 70].run_ns == 2000
