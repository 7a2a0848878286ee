"""The daemon is killed at any line of what prepares, replaces or drops a claim. The next one agrees with itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qgpu.daemon import claim_requests, prepared_grants
from qgpu.linux import atomic_file
from qgpu.runtime import claim_cdi
from tests.daemon.claim_rig import Rig
from tests.daemon.killed_daemon import DONE, KILLED, UNCHANGED, in_process, killed_after
from tests.simulation import MORE

pytestmark = pytest.mark.root

#: Where the daemon is killed: at each line of these files.
FILES = {module.__file__ for module in (claim_requests, prepared_grants, claim_cdi, atomic_file)}


def prepare(rig: Rig) -> None:
    rig.prepare("a", rig.device(cores=60, share="s"))


def replace(rig: Rig) -> None:
    rig.prepare("a", rig.device(1, cores=50, share="t"))


def drop(rig: Rig) -> None:
    rig.ask("grant.drop", uid="a")


def checked(before: set[Any], call: Callable[[Rig], None], after: set[Any]) -> Callable[[Rig], int]:
    """Check what the next daemon finds, and that the request works there; UNCHANGED if nothing had been done."""

    def run(rig: Rig) -> int:
        found = holding(rig)
        assert found in (before, after)
        kept, shown = rig.files()
        assert kept == shown == set(rig.listed())
        for uid in kept:
            devices = {device["name"] for device in rig.specification(uid)["devices"]}
            assert devices == {name for _, _, name in found}
        assert not list(rig.cdi.glob(".*"))
        call(rig)  # as the kubelet does, which had no answer
        assert holding(rig) == after
        return UNCHANGED if found == before else DONE

    return run


def holding(rig: Rig) -> set[Any]:
    """Return the card, quota and name of each prepared device."""
    return {
        (rig.uuids.index(device["gpu"]), device["cores"], device["cdi"].partition("=")[2])
        for grant in rig.listed().values()
        for device in grant["devices"]
    }


@pytest.mark.parametrize(
    ("earlier", "before", "call", "after"),
    [
        (None, set(), prepare, {(0, 60, "a-s")}),
        (prepare, {(0, 60, "a-s")}, replace, {(1, 50, "a-t")}),
        (prepare, {(0, 60, "a-s")}, drop, set()),
    ],
    ids=["prepare", "replace", "drop"],
)
def test_killed_at_any_line_it_is_before_or_after(
    tmp_path: Path,
    earlier: Callable[[Rig], None] | None,
    before: set[Any],
    call: Callable[[Rig], None],
    after: set[Any],
) -> None:
    start, here = tmp_path / "start", tmp_path / "here"
    start.mkdir()
    if earlier is not None:
        assert in_process(partial(Rig, start), earlier) == DONE
    found = set()
    for lines in range(0, 10_000, 1 if MORE > 1 else 5):
        shutil.copytree(start, here)
        killed = in_process(partial(Rig, here), killed_after(lines, call, FILES.__contains__))
        assert killed in (KILLED, DONE)
        then = in_process(partial(Rig, here), checked(before, call, after))
        assert then in (UNCHANGED, DONE), f"killed after {lines} lines"
        shutil.rmtree(here)
        if killed == DONE:
            break
        found.add(then)

    assert then == DONE
    assert found == {UNCHANGED, DONE}, "it was killed before the change, and after it"
