"""Our client of RM asks for what every branch knows."""

from __future__ import annotations

from typing import Any

import pytest

from qgpu.nvidia import abi, rm_client
from qgpu.nvidia.abi import ffi

SIZE = 6 << 30 | 3 << 12
#: What GET_SURFACE_INFO tells of memory, by index: before 580, and the whole size in two parts since (ctrl0041.h).
BEFORE_580 = {1: 0, 5: 0, 7: SIZE >> 12, 8: 0, 9: 2}
SINCE_580 = BEFORE_580 | {2: SIZE & 0xFFFFFFFF, 3: SIZE >> 32}


@pytest.mark.parametrize("known", [BEFORE_580, SINCE_580], ids=["before 580", "since 580"])
def test_each_branch_tells_how_large_memory_is(monkeypatch: pytest.MonkeyPatch, known: dict[int, int]) -> None:
    def answer(_fd: int, _number: int, call: Any) -> None:
        params = ffi.cast("NV0041_CTRL_GET_SURFACE_INFO_PARAMS *", call.params)
        entries = ffi.cast("NV0041_CTRL_SURFACE_INFO *", params.surfaceInfoList)
        for place in range(params.surfaceInfoListSize):
            if entries[place].index not in known:
                call.status = abi.NV_ERR_INVALID_ARGUMENT
                return
            entries[place].data = known[entries[place].index]

    monkeypatch.setattr(abi, "ioctl", answer)

    assert rm_client.memory_bytes(0, 7, 10) == SIZE
