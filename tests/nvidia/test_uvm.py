"""UVM's calls as each driver reads them (sizes and offsets measured on the headers of these versions)."""

from __future__ import annotations

import pytest

from qgpu.nvidia import uvm

FEW, MANY = (1200, 1196, 1188, 1184, 1176), (9264, 9260, 9252, 9248, 9240)
#: The size of MAP_EXTERNAL_ALLOCATION, where its status and client lie; ALLOC_SEMAPHORE_POOL's size and status.
MAPPINGS = {
    "535.43.02": FEW,
    "535.288.01": FEW,
    "545.29.06": FEW,
    "550.40.07": FEW,
    "550.40.53": MANY,
    "550.40.85": MANY,
    "550.54.14": MANY,
    "555.42.02": MANY,
    "565.77": MANY,
    "575.64.05": MANY,
    "580.142": MANY,
    "595.45.04": MANY,
}
#: The sizes and offsets of the status of FREE and UNREGISTER_CHANNEL, and the latter's offset of the client.
BEFORE_590, SINCE_590 = (24, 16, 28, 24, 16), (16, 8, 12, 8, 0)


@pytest.mark.parametrize(("version", "expected"), MAPPINGS.items())
def test_mappings_lie_where_each_driver_reads_them(version: str, expected: tuple[int, ...]) -> None:
    layouts = uvm.layouts(version)
    mapping, pool = layouts[uvm.MAP_EXTERNAL_ALLOCATION], layouts[uvm.ALLOC_SEMAPHORE_POOL]

    assert (mapping.size, mapping.status_at, mapping.client_at, pool.size, pool.status_at) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [("535.43.02", BEFORE_590), ("580.142", BEFORE_590), ("590.44.01", SINCE_590), ("595.45.04", SINCE_590)],
)
def test_calls_that_590_made_shorter_are_so_since(version: str, expected: tuple[int, ...]) -> None:
    layouts = uvm.layouts(version)
    free, channel = layouts[uvm.FREE], layouts[uvm.UNREGISTER_CHANNEL]

    assert (free.size, free.status_at, channel.size, channel.status_at, channel.client_at) == expected
