"""Handlers of probes run with preemption off: nothing that one of them reaches may sleep."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kmod.test_layers import KMOD, code

SLEEPS = re.compile(
    r"\b(cond_resched|mutex_lock\w*|down_\w+|synchronize_\w+|wait_event\w*|wait_var_event|schedule_timeout\w*"
    r"|copy_(?:from|to)_user|[gp]et_user|put_user|kvcalloc|flush_\w+|cancel_\w+_sync|GFP_KERNEL\w*|rm_ops)\b"
)
BODIES = {
    path.stem: dict(re.findall(r"^\w[\w *]*?\b(\w+)\([^;{]*\)\n\{(.*?)^\}", code(path), re.M | re.S))
    for path in KMOD.glob("*.c")
}
HOME = {name: stem for stem, bodies in BODIES.items() for name in bodies}
HANDLERS = sorted(
    (path.stem, name)
    for path in KMOD.glob("*.c")
    if "pt_regs" in code(path)
    for name in set(
        re.findall(r"\.(?:called|entered|returned|(?:pre|post)_handler) = (\w+)\b(?!->)", code(path))
        + re.findall(r"^\t\{ \w*, (\w+)", code(path), re.M)
    )
    if name in BODIES[path.stem]
)


def _called(stem: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the functions that one calls, or hands to another; not those that a handler sends its caller to."""
    body = re.sub(r"instruction_pointer_set\([^;]*;", "", BODIES[stem][name])
    for other in re.findall(r"(?<![\w.>])(\w+)(?=\(|\))", body):
        home = stem if other in BODIES[stem] else HOME.get(other)
        if home and (home == stem or other.startswith("qgpu_")):
            yield home, other


def _ways_to_sleep(stem: str, name: str) -> dict[str, list[str]]:
    """Return what sleeps below a function, and the way there."""
    ways: dict[str, list[str]] = {}
    seen, todo = {(stem, name)}, [(stem, name, [name])]
    while todo:
        stem, name, way = todo.pop()
        ways |= dict.fromkeys(SLEEPS.findall(BODIES[stem][name]), way)
        for each in _called(stem, name):
            if each not in seen:
                seen.add(each)
                todo.append((*each, [*way, each[1]]))
    return ways


def test_the_handlers_are_found():
    assert {("toctou", "entered"), ("uvm", "mmap_called"), ("uvm_mem", "dup_called"), ("power", "called")} < set(
        HANDLERS
    )


@pytest.mark.parametrize(("stem", "name"), HANDLERS)
def test_a_handler_of_a_probe_does_not_sleep(stem, name):
    assert _ways_to_sleep(stem, name) == {}
