"""Which versions of the driver the module touches: what tests/record_prototypes.py lists."""

from __future__ import annotations

import re
from pathlib import Path

from qgpu.nvidia import versions
from tests import record_prototypes

_KBUILD = 'ccflags-y += -DNV_VERSION_STRING=\\"580.178.04\\"\n'


def test_a_package_is_read_as_the_version_it_names(tmp_path: Path) -> None:
    (tmp_path / "Kbuild").write_text(_KBUILD)
    (tmp_path / "common").mkdir()
    (tmp_path / "common/nv.h").write_text("text")
    found = record_prototypes.in_source(tmp_path)

    assert {version: read("kernel-open/common/nv.h") for version, read in found.items()} == {"580.178.04": "text"}


def test_a_version_with_another_prototype_is_unlisted() -> None:
    before = record_prototypes.header(["535.98", "580.142", "595.45.04"])
    after = record_prototypes.listed(before, {"580.142": ["rm_ioctl"], "580.178.04": [], "535.261.03": []})

    assert after == ["535.98", "535.261.03", "580.178.04", "595.45.04"]


def test_a_file_without_the_functions_lacks_them_all() -> None:
    assert len(record_prototypes.lacks(lambda _: "")) == sum(map(len, record_prototypes.NEEDED.values()))


def test_branches_tried_on_the_driver_itself_are_listed() -> None:
    text = record_prototypes.HEADER.read_text()

    assert {"535.261.03", "550.163.01", "580.178.04", "595.99.02"} <= set(record_prototypes.listed(text, {}))


def test_module_and_daemon_know_the_same_branches() -> None:
    table = re.search(
        r"rm_branches\[\] = \{(.*?)\};", (record_prototypes.HEADER.parent / "rm.c").read_text(), re.DOTALL
    )
    assert table is not None

    majors = [int(major) for major in re.findall(r"\{ (\d+),", table[1])]
    assert majors == [branch.major for branch in reversed(versions.BRANCHES)]
