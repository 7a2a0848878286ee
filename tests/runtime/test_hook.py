"""What the hook needs of a node: the interpreter that runs qgpud, and nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from qgpu.runtime import cdi, hook


def test_hook_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(hook.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}

    assert imported <= sys.stdlib_module_names
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_hook_runs_without_environment_and_home(tmp_path: Path) -> None:
    """A runtime starts it so; the daemon is away, so it refuses, in one line."""
    (tmp_path / "config.json").write_text("{}")
    state = {"id": "one", "pid": 1, "bundle": str(tmp_path)}
    command = cdi.hook_entry(tmp_path / "qgpud.sock")["args"]

    result = subprocess.run(
        command, input=json.dumps(state), env={}, cwd="/", capture_output=True, text=True, check=False
    )

    assert result.returncode == 1
    assert "qgpud does not answer" in result.stderr
    assert result.stderr.count("\n") == 1


def test_hook_names_the_interpreter_that_runs_the_daemon(tmp_path: Path) -> None:
    """So no node that runs qgpud lacks one, and a virtual environment finds its own."""
    assert cdi.hook_entry(tmp_path)["path"] == sys.executable
