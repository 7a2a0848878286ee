"""RM's ABI: sizes and offsets as NVIDIA's headers have them (measured on the headers of 535 to 595)."""

from __future__ import annotations

import pytest

from qgpu.errors import NoGpuError, NotSupportedError
from qgpu.nvidia import abi, versions

SIZES = {
    "NVOS00_PARAMETERS": 16,
    "NVOS02_PARAMETERS_WITH_FD": 56,
    "NVOS21_PARAMETERS": 32,
    "NVOS32_PARAMETERS": 184,
    "NVOS33_PARAMETERS_WITH_FD": 56,
    "NVOS54_PARAMETERS": 32,
    "NVOS55_PARAMETERS": 28,
    "NVOS64_PARAMETERS": 48,
    "nv_ioctl_card_info_t": 72,
    "nv_ioctl_xfer_t": 16,
    "NV0080_ALLOC_PARAMETERS": 56,
    "NV2080_ALLOC_PARAMETERS": 4,
    "NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS": 20,
    "NV_MEMORY_ALLOCATION_PARAMS": 128,
    "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS": 536,
    "NVA06C_CTRL_PREEMPT_PARAMS": 8,
    "NV_EVENT_BUFFER_ALLOC_PARAMETERS": 72,
    "NV_EVENT_BUFFER_FECS_RECORD": 32,
    "NV00F8_CTRL_GET_INFO_PARAMS": 32,
    "NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS": 24,
}
OFFSETS = {
    ("NVOS54_PARAMETERS", "status"): 28,
    ("NVOS64_PARAMETERS", "status"): 40,
    ("NVOS21_PARAMETERS", "status"): 28,
    ("NVOS32_PARAMETERS", "size"): 88,
    ("NVOS32_PARAMETERS", "status"): 20,
    ("NVOS02_PARAMETERS_WITH_FD", "status"): 40,
    ("NV_MEMORY_ALLOCATION_PARAMS", "size"): 64,
    ("NV_MEMORY_ALLOCATION_PARAMS", "attr"): 24,
    ("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", "engineType"): 12,
    ("NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS", "hClientList"): 24,
    ("NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS", "hChannelList"): 280,
    ("NVA06C_CTRL_PREEMPT_PARAMS", "bManualTimeout"): 1,
    ("nv_ioctl_card_info_t", "gpu_id"): 16,
    ("nv_ioctl_card_info_t", "minor_number"): 56,
    ("NV_EVENT_BUFFER_FECS_RECORD", "timestamp"): 24,
    ("NV00F8_CTRL_GET_INFO_PARAMS", "allocFlags"): 16,
}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_structures_have_the_sizes_rm_compares_with(name, size):
    assert abi.sizeof(name) == size


@pytest.mark.parametrize(("field", "offset"), OFFSETS.items(), ids=str)
def test_fields_lie_where_rm_reads_them(field, offset):
    assert abi.ffi.offsetof(*field) == offset


def test_parsed_structures_are_not_parsed_again(monkeypatch):
    abi.parse_types()
    monkeypatch.setattr(abi.ffi, "_parser", None)

    assert abi.ffi.new("NV0041_CTRL_GET_SURFACE_INFO_PARAMS *").surfaceInfoListSize == 0


def test_an_escape_is_encoded_as_nvidias_libraries_do():
    assert abi.request(abi.NV_ESC_RM_CONTROL, 32) == 0xC020462A


@pytest.mark.parametrize("version", ["535.183.01", "550.163.01", "580.159.04", "595.45.04"])
def test_every_known_branch_has_a_row(version):
    assert versions.find(version).major == int(version.split(".")[0])


@pytest.mark.parametrize("version", ["470.256.02", "5800.1", "640.10", "", "x"])
def test_an_unknown_branch_is_refused_in_one_clear_line(version):
    with pytest.raises(NotSupportedError, match="branch not known") as caught:
        versions.find(version)

    assert "\n" not in str(caught.value)


def test_rows_are_in_order_and_once_each():
    majors = [branch.major for branch in versions.BRANCHES]

    assert majors == sorted(set(majors))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)\n", "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86  Release\nGCC version: 12\n",
            "570.86",
        ),
    ],
)
def test_the_version_is_read_from_either_flavour_of_the_driver(text, version):
    assert versions.parse(text) == version


def test_a_text_without_a_version_is_refused():
    with pytest.raises(NotSupportedError):
        versions.parse("GCC version: 12.2.0\n")


def test_no_driver_is_said_so(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "VERSION_FILE", tmp_path / "version")

    with pytest.raises(NoGpuError, match="not loaded"):
        versions.installed()
