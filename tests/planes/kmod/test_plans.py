"""The daemon tells the module each part of a plan: the gate, what it covers, and both timeslices."""

from __future__ import annotations

import pytest

from qgpu.model import NS_PER_MS, OnIdle, Plan, PodClass, PodPlan, Window
from qgpu.planes.kmod.backend import KmodBackend
from qgpu.planes.kmod.uapi import NUMBERS, ffi
from tests.planes.kmod.test_left_pods import CARDS, FakeDevice, FakePod

MS = NS_PER_MS
GATED, COPIES = NUMBERS["QGPU_POD_PLAN_GATED"], NUMBERS["QGPU_POD_PLAN_COPIES"]
KEPT, LENT = Window(0, 10 * MS), Window(20 * MS, 30 * MS, OnIdle.YIELD)


class PlanDevice(FakeDevice):
    """A module with one pod that remembers the part of the last plan."""

    def __init__(self) -> None:
        super().__init__()
        self.pods = {1: FakePod("a")}
        self.part: tuple[int, int, int] | None = None

    def plan(self, nr_pods: int, pods: int, **fields: int) -> None:
        assert (nr_pods, fields["pod_plan_size"]) == (1, ffi.sizeof("struct qgpu_pod_plan"))
        (part,) = ffi.cast("struct qgpu_pod_plan(*)[1]", pods)[0]
        self.part = part.flags, part.timeslice_us, part.copy_timeslice_us

    def idle(self, **_: int) -> None:
        """Nothing follows from it."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> KmodBackend:
    monkeypatch.setattr("qgpu.planes.kmod.backend.Device", PlanDevice)
    return KmodBackend(0, CARDS[0], None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "flags"),
    [
        (None, 0),
        ((), GATED | COPIES),
        ((KEPT,), GATED | COPIES),
        ((LENT,), GATED),
        ((KEPT, LENT), GATED),
    ],
    ids=["always open", "never open", "kept", "lent", "both"],
)
def test_gate_covers_copies_where_no_window_is_lent(
    backend: KmodBackend, windows: tuple[Window, ...] | None, flags: int
) -> None:
    backend.apply(Plan(0, 100 * MS, (PodPlan("a", PodClass.OFFLINE, 5000, windows),)))

    assert backend._device.part == (flags, 5000, 0)  # type: ignore[attr-defined]


def test_copy_timeslice_is_told_apart_from_computes(backend: KmodBackend) -> None:
    backend.apply(Plan(0, 100 * MS, (PodPlan("a", PodClass.OFFLINE, 5000, copy_timeslice_us=2000),)))

    assert backend._device.part == (0, 5000, 2000)  # type: ignore[attr-defined]
