from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from qgpu.demo.live_table import LiveTable, Row
from qgpu.demo.plot import PlayedScene, Point, draw
from qgpu.demo.scenes import SCENES

PNG = b"\x89PNG"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for sockets in it, wherever tests have theirs."""
    with tempfile.TemporaryDirectory(prefix="demo.", dir="/tmp") as name:
        yield Path(name)


def test_demo_ends_on_simulator_and_leaves_only_its_picture(short_path: Path):
    picture = short_path / "demo.png"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QGPU_")}
    ended = subprocess.run(
        [sys.executable, "-m", "qgpu.demo", "--plane", "sim", "--duration-scale", "0.1", "--out", picture],
        env=environment | {"TMPDIR": str(short_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert picture.read_bytes()[:4] == PNG
    assert list(short_path.iterdir()) == [picture]
    assert not [process.pid for process in psutil.process_iter(["cmdline"]) if str(short_path) in _words(process)]


def _words(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.caption)
def test_a_scene_hands_out_no_more_than_one_card(scene):
    assert sum(scene.targets.values()) <= 1


def test_only_pods_that_have_come_are_changed_or_leave():
    here = set()
    for scene in SCENES:
        here |= {pod.name for pod in scene.starts}

        assert {change[0] for change in scene.amend} <= here
        assert set(scene.targets) <= here
        assert {pod.name for pod in scene.ends} <= here

        here -= {pod.name for pod in scene.ends}


def test_a_table_that_is_no_terminal_has_no_control_codes():
    stream = io.StringIO()
    table = LiveTable(stream, fancy=False)
    table.scene(1, 2, "best-effort", "words")
    table.show(1.0, [Row("a", "offline", 60, 0.5, 0.5, None), Row("b", "online", None, 0.02, None, 369.0)])

    assert "\033" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].split() == ["1.0", "s", "a", "50.0%", "b", "2.0%", "p99", "369", "µs"]


def test_a_table_on_a_terminal_is_drawn_over_the_last_one():
    stream = io.StringIO()
    table = LiveTable(stream, fancy=True)
    rows = [Row("a", "offline", 60, share, 0.5, None) for share in (-0.1, 0.0, 0.5, 1.0, 1.1)]
    table.show(1.0, rows)
    height = stream.getvalue().count("\n")
    table.show(2.0, rows)

    assert f"\033[{height}A\033[J" in stream.getvalue()


def test_picture_of_a_demo_without_samples_can_be_drawn(tmp_path: Path):
    path = tmp_path / "empty.png"
    draw(path, "nothing", [PlayedScene(SCENES[0], 0.0, 1.0)], [Point(1.0, {}, None)])

    assert path.read_bytes()[:4] == PNG
