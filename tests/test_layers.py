"""The arrows between the rooms of the package: who may import whom. Any other import is a defect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qgpu"

#: Packages whose folders are rooms of their own.
SPLIT = {"guardian", "planes"}

#: What each room may import, from the lowest floor to the highest: only rooms above it in this table.
ARROWS: dict[str, set[str]] = {
    # the ground: values, and what any program needs
    "errors": set(),
    "paths": set(),
    "units": {"errors"},
    "toml_tables": {"errors"},
    "start": set(),
    "entry_point": {"errors"},
    "manual": {"entry_point", "errors"},
    "model": {"errors"},
    # the machine and the card
    "linux": {"errors"},
    "ipc": {"errors", "linux", "model", "paths"},
    "nvidia": {"errors", "model"},
    "lsm": {"errors", "linux"},
    # deciding
    "policies": {"errors", "model"},
    "claim_division": {"errors", "model"},
    "sched": {"model"},
    # the guardian: a process of its own
    "guardian.rules": {"nvidia"},
    "guardian.accounting": {"ipc", "linux", "model", "nvidia"},
    "guardian.gpu": {"errors", "guardian.accounting", "ipc", "linux", "model", "nvidia"},
    "guardian.failover": {"errors", "guardian.accounting", "guardian.gpu", "ipc", "linux", "nvidia"},
    "guardian.proxy": {
        "errors",
        "guardian.accounting",
        "guardian.failover",
        "guardian.gpu",
        "guardian.rules",
        "linux",
        "nvidia",
    },
    "guardian": {
        "errors",
        "guardian.accounting",
        "guardian.failover",
        "guardian.gpu",
        "guardian.proxy",
        "ipc",
        "linux",
        "model",
        "nvidia",
    },
    # beside the pods
    "load": {"entry_point", "errors", "ipc", "linux", "model", "paths", "units"},
    "runtime": {"errors", "guardian.proxy", "ipc", "linux", "model", "nvidia", "units"},
    "checkpoint": {"errors", "guardian.accounting", "linux", "model", "nvidia", "units"},
    # the planes: none knows another
    "planes.kmod": {"checkpoint", "errors", "linux", "model", "units"},
    "planes.seccomp": {
        "checkpoint",
        "errors",
        "guardian.failover",
        "guardian.proxy",
        "guardian.rules",
        "ipc",
        "linux",
        "model",
        "nvidia",
        "units",
    },
    "planes.sim": {"errors", "ipc", "linux", "load", "model", "units"},
    "slurm": {"errors", "model", "units"},
    # what operators set and see
    "config": {"errors", "ipc", "model", "policies", "toml_tables", "units"},
    "changes": {"units"},
    "log": {"changes", "config", "ipc", "linux"},
    "admission": {"config", "errors", "linux", "model", "policies", "units"},
    "metrics": {"errors", "ipc", "model", "sched"},
    "trace": {"errors", "ipc", "model", "sched"},
    "live_shares": {"ipc"},
    "web": {"errors", "ipc", "live_shares"},
    "groups": {"errors", "ipc", "linux", "model", "nvidia", "paths", "runtime"},
    "simulate": {
        "admission",
        "config",
        "errors",
        "load",
        "model",
        "planes.sim",
        "policies",
        "sched",
        "toml_tables",
        "units",
    },
}
#: The programs: each puts its parts together, so it may import any room but another program.
PROGRAMS = {"daemon", "cli", "doctor", "demo", "k8s"}

#: Modules a policy has no business with: it has no clock, no dice and no hands.
FORBIDDEN_TO_POLICIES = {"os", "time", "random", "socket", "threading", "subprocess", "datetime"}


def room(module: str) -> str:
    """Return the room of a dotted name below qgpu."""
    _, first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first in SPLIT and rest and (PACKAGE / first / rest[0]).is_dir() else first


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "qgpu":
                yield from (f"qgpu.{alias.name}" for alias in node.names)
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_rooms_import_only_along_the_arrows(path: Path) -> None:
    mine = room(".".join(("qgpu", *path.with_suffix("").parts)))
    used = {room(name) for name in imports(PACKAGE / path) if name.startswith("qgpu.")} - {mine, "__version__"}

    if mine in PROGRAMS:
        assert not used & PROGRAMS - {"doctor"}, "only qgpuctl runs another program's code: doctor's"
    elif mine not in ("__init__", "planes"):
        assert mine in ARROWS, f"a new room: say in ARROWS what {mine} may import"
        assert used <= ARROWS[mine]


def test_arrows_only_point_downwards() -> None:
    rooms = list(ARROWS)

    assert all(rooms.index(used) < rooms.index(mine) for mine, below in ARROWS.items() for used in below)


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "policies"], ids=str)
def test_policies_have_no_clock_no_dice_and_no_hands(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(PACKAGE / path)} & FORBIDDEN_TO_POLICIES
