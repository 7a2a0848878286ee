"""The start of programs: what a signal does before a program can handle it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qgpu import start

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("handler", "code"), [(signal.default_int_handler, -signal.SIGINT), (signal.SIG_IGN, 7)], ids=["usual", "ignored"]
)
def test_ctrl_c_while_modules_load_prints_no_traceback(tmp_path: Path, handler: signal.Handlers, code: int) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\n\ndef main():\n    sys.exit(7)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", "from qgpu import start; start.run('slow')"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
        check=False,
    )

    assert (result.returncode, result.stderr) == (code, b"")


def test_every_program_starts_so() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    for name, target in scripts.items():
        module, _, function = target.partition(":")
        assert module == "qgpu.start", name
        assert getattr(start, function), name
