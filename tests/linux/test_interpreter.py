"""Children that run Python: their command line, and that no other is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qgpu
from qgpu.linux import interpreter

PACKAGE = Path(qgpu.__file__).parent
#: What a message tells a person to type; the hook, which container runtimes start, isolated by itself.
_HARMLESS = re.compile(r'\{sys\.executable\}|\[sys\.executable, "-I", ')


@pytest.mark.parametrize("options", [["-I"], []])
def test_child_takes_no_code_from_the_folder_it_starts_in(tmp_path, options):
    (tmp_path / "qgpu").mkdir()
    (tmp_path / "qgpu/__init__.py").write_text("raise SystemExit('taken')\n")
    ask = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); from qgpu.linux.interpreter import python as p; "
    child = 'print(p("-c", "")[1:-2], __import__("subprocess").run(p("-c", "import qgpu"), cwd=sys.argv[1]).returncode)'
    shown = subprocess.run(
        [sys.executable, *options, "-c", ask + child, str(tmp_path)],
        cwd="/",
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == [f"['{'-I' if options else '-P'}']", "0"], shown.stderr


def test_no_other_file_starts_python():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if "sys.executable" in _HARMLESS.sub("", line)
    }
    assert found == {str(Path(interpreter.__file__).relative_to(PACKAGE))}
