"""One header for gcc and cffi: what both make of it must be the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qgpu.planes.kmod import uapi

HEADER = Path(__file__).resolve().parents[3] / "kmod" / "uapi" / "qgpu.h"
CC = shutil.which("cc") or shutil.which("gcc")


def structs() -> dict[str, list[str]]:
    return {
        name: [field for field, _ in uapi.ffi.typeof(name).fields]
        for name in {*uapi.STRUCTS.values(), "struct qgpu_window", "struct qgpu_pod_plan", "struct qgpu_event"}
    }


def expectations() -> dict[str, int]:
    expected = dict(uapi.NUMBERS) | dict(uapi.COMMANDS)
    for name, fields in structs().items():
        expected[f"sizeof({name})"] = uapi.ffi.sizeof(name)
        for field in fields:
            expected[f"__builtin_offsetof({name}, {field})"] = uapi.ffi.offsetof(name, field)
    return expected


def test_every_number_struct_and_command_of_the_header_is_read() -> None:
    text = HEADER.read_text()

    assert set(re.findall(r"^#define (QGPU_\w+) ", text, re.M)) == set(uapi.NUMBERS) | set(uapi.COMMANDS)
    assert set(re.findall(r"^(struct \w+) \{", text, re.M)) == set(structs())


@pytest.mark.skipif(CC is None, reason="no C compiler")
def test_gcc_and_cffi_agree_on_sizes_offsets_and_numbers(tmp_path: Path) -> None:
    expected = expectations()
    lines = "".join(f'\tprintf("%llu\\n", (unsigned long long)({what}));\n' for what in expected)
    source = tmp_path / "abi.c"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void)\n{{\n{lines}\treturn 0;\n}}\n')
    flags = ["-Wall", "-Wpadded", "-Werror", "-o", str(tmp_path / "abi")]
    subprocess.run([str(CC), *flags, str(source)], check=True)
    answers = subprocess.run([str(tmp_path / "abi")], check=True, capture_output=True, text=True).stdout.split()

    assert dict(zip(expected, map(int, answers), strict=True)) == expected


def test_limits_are_the_models() -> None:
    from qgpu import model

    assert uapi.NUMBERS["QGPU_MIN_TIMESLICE_US"] == model.MIN_TIMESLICE_US
    assert uapi.NUMBERS["QGPU_MAX_TIMESLICE_US"] == model.MAX_TIMESLICE_US
    assert uapi.NUMBERS["QGPU_MIN_PERIOD_NS"] == model.MIN_PERIOD_NS
    assert uapi.NUMBERS["QGPU_MAX_PERIOD_NS"] == model.MAX_PERIOD_NS
