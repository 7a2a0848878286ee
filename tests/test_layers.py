"""The arrows between the rooms of the package: who may import whom. Any other import is a defect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qgpu"

#: The data planes live beside the seam they fill, each a room of its own.
PLANES = {"sim", "seccomp", "kmod"}

#: What each room may import of the others. The composition roots (daemon, cli) may import any but each other.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "messages": {"model"},
    "turns": {"model"},
    "units": {"errors"},
    "wire": set(),
    "foreign_fds": set(),
    "seats": set(),
    "systemd": {"wire"},
    "places": set(),
    "plane": set(),
    "ending": set(),
    "logfile": set(),
    "loglimit": set(),
    "proc": set(),
    "files": set(),
    "tables": {"errors"},
    "program": {"errors"},
    "door": {"errors", "foreign_fds", "systemd"},
    "uapi": {"errors"},
    "cgroup": {"errors"},
    "policies": {"errors", "model", "turns"},
    "sched": {"errors", "model", "turns"},
    "sched.sim": {"cgroup", "errors", "load", "model", "proc", "sched", "sim"},
    "sched.seccomp": {"cgroup", "errors", "guardian", "messages", "model", "proc", "sched", "systemd", "wire"},
    "sched.kmod": {"cgroup", "errors", "model", "sched", "uapi"},
    "rm": {"errors", "model"},
    "guardian": {
        "cgroup",
        "errors",
        "foreign_fds",
        "logfile",
        "loglimit",
        "messages",
        "model",
        "proc",
        "rm",
        "sched",
        "wire",
    },
    "lsm": {"cgroup", "errors", "proc"},
    "load": {"control", "errors", "model", "places", "program", "units", "wire"},
    "sim": {"admission", "config", "errors", "load", "model", "policies", "sched", "sched.sim", "tables", "units"},
    "config": {"errors", "httpd", "model", "plane", "policies", "tables", "units"},
    "httpd": {"errors", "wire"},
    "metrics": {"errors", "httpd", "model", "sched"},
    "looks": {"control"},
    "web": {"control", "errors", "httpd", "looks"},
    "admission": {"cgroup", "config", "errors", "model", "policies", "sched", "units"},
    "control": {"door", "errors", "foreign_fds", "places", "seats", "systemd", "wire"},
    "runtime": {
        "cgroup",
        "door",
        "errors",
        "files",
        "foreign_fds",
        "guardian",
        "model",
        "proc",
        "rm",
        "sched",
        "systemd",
        "units",
    },
    "trace": {"control", "errors", "messages", "model", "sched"},
    "launch": {"cgroup", "errors", "guardian", "rm", "wire"},
}
ROOTS = {"daemon", "cli", "doctor", "demo"}

#: Modules a policy has no business with: it has no clock, no dice and no hands.
FORBIDDEN_TO_POLICIES = {"os", "time", "random", "socket", "threading", "subprocess", "datetime"}


def room(module: str) -> str:
    """Return the room of a dotted name below qgpu."""
    _, first, *rest = module.split(".")
    return f"sched.{rest[0]}" if first == "sched" and rest and rest[0] in PLANES else first


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

    if mine in ROOTS:
        assert not used & {"daemon", "cli"}, "nobody imports a composition root"
    elif mine != "__init__":
        assert mine in ARROWS, f"a new room: say in ARROWS what {mine} may import"
        assert used <= ARROWS[mine]


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "policies"], ids=str)
def test_policies_have_no_clock_no_dice_and_no_hands(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(PACKAGE / path)} & FORBIDDEN_TO_POLICIES
