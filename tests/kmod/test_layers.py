"""The order of the module's files, which kmod/Kbuild declares: each includes and calls only what stands before it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KMOD = Path(__file__).resolve().parents[2] / "kmod"
#: Headers without a source of their own: types and numbers, below everything.
GROUND = {"compat", "driver_versions", "nvrm", "rules", "trace", "uapi/qgpu"}
#: Types that stand on pods.
OBJECT_TABLE = "object_table"
#: Another module, which stands on this one.
GLUE = "rm_glue"

ORDER = [
    name for line in re.findall(r"^qgpu-y \+?:?= (.*)$", (KMOD / "Kbuild").read_text(), re.M) for name in line.split()
]
FLOOR = {name.removesuffix(".o"): floor for floor, name in enumerate(ORDER)} | {GLUE: len(ORDER)}
FLOOR[OBJECT_TABLE] = FLOOR["pod"]
SOURCES = sorted(path.name for suffix in ("c", "h") for path in KMOD.glob(f"*.{suffix}") if path.stem not in GROUND)


def code(path: Path) -> str:
    """Return a source without its comments and strings."""
    return re.sub(r'/\*.*?\*/|//[^\n]*|"[^"\n]*"', "", path.read_text(), flags=re.DOTALL)


def _home() -> dict[str, str]:
    """Return by name in which file what others can reach is defined."""
    found = {}
    for name in FLOOR.keys() - {OBJECT_TABLE}:
        text = code(KMOD / f"{name}.c")
        found |= dict.fromkeys(re.findall(r"^(?!static)\w[\w *]*?\b(qgpu_\w+)\([^;{]*\)\n\{", text, re.M), name)
        variables = re.findall(
            r"^(?!static|extern)(?:DEFINE_MUTEX\(|atomic_t |struct \w+ )(qgpu_\w+)[^{\n]*;", text, re.M
        )
        found |= dict.fromkeys(variables, name)
    return found


HOME = _home()


def test_every_source_has_its_floor():
    assert {path.stem for path in KMOD.glob("*.c")} == FLOOR.keys() - {OBJECT_TABLE}
    assert {path.stem for path in KMOD.glob("*.h")} <= FLOOR.keys() | GROUND
    assert len(set(ORDER)) == len(ORDER)


def test_what_a_header_declares_is_its_own_sources():
    for name in sorted(FLOOR.keys() - {GLUE}):
        path = KMOD / f"{name}.h"
        declared = (
            re.findall(r"^(?!static)\w[\w *]*?\b(qgpu_\w+)\([^{]*?\);", code(path), re.M) if path.exists() else []
        )
        assert {each: HOME.get(each) for each in declared} == dict.fromkeys(declared, name)


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_includes_only_what_stands_below(source):
    mine = FLOOR[Path(source).stem]
    for included in re.findall(r'^#include "([^"]+)\.h"', (KMOD / source).read_text(), re.M):
        assert included in GROUND or FLOOR[included] <= mine, included


@pytest.mark.parametrize("source", [source for source in SOURCES if source.endswith(".c")])
def test_a_file_calls_only_what_stands_below(source):
    mine = FLOOR[Path(source).stem]
    used = {name for name in re.findall(r"(?<!struct )\b(qgpu_\w+)\b", code(KMOD / source)) if name in HOME}

    assert {name: HOME[name] for name in used if FLOOR[HOME[name]] > mine} == {}


def test_headers_of_the_ground_include_the_ground():
    for name in GROUND - {"rules"}:  # rules.h is part of rule_lookup.c
        for included in re.findall(r'^#include "([^"]+)\.h"', (KMOD / f"{name}.h").read_text(), re.M):
            assert included in GROUND, f"{name}.h includes {included}.h"
