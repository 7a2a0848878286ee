"""The Python packages inside the Debian packages: one folder serves several Pythons, or the build says what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packaging"))

import site_packages

WHEEL = {
    "pure.py": "1",
    "pure-1.dist-info/METADATA": "Name: pure",
    "pure-1.dist-info/RECORD": "a hash",
    "bin/tool": "#!",
}


def installation(place: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def contents(place: Path) -> dict[str, str]:
    return {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}


def test_compiled_modules_of_all_pythons_lie_side_by_side(tmp_path: Path) -> None:
    old = installation(tmp_path / "old", WHEEL | {"_c.cpython-311-x86_64-linux-gnu.so": "eleven"})
    new = installation(tmp_path / "new", WHEEL | {"_c.cpython-312-x86_64-linux-gnu.so": "twelve", "bin/tool": "#!!"})
    site_packages.merge([old, new], tmp_path / "both")

    assert contents(tmp_path / "both") == {
        "pure.py": "1",
        "pure-1.dist-info/METADATA": "Name: pure",
        "_c.cpython-311-x86_64-linux-gnu.so": "eleven",
        "_c.cpython-312-x86_64-linux-gnu.so": "twelve",
    }


@pytest.mark.parametrize("name", ["pure.py", "pure-1.dist-info/METADATA"])
def test_a_package_that_differs_between_pythons_stops_the_build(tmp_path: Path, name: str) -> None:
    old = installation(tmp_path / "old", WHEEL)
    new = installation(tmp_path / "new", WHEEL | {name: "2"})

    with pytest.raises(SystemExit, match=f"{name} differs"):
        site_packages.merge([old, new], tmp_path / "both")


def test_the_frame_is_an_environment_for_the_python_it_is_given(tmp_path: Path) -> None:
    home = tmp_path / "home"
    site_packages.make_home(home)
    (home / "lib/python3/site-packages/only_here.py").write_text("HERE = True\n")
    (home / "bin/python").symlink_to(sys._base_executable)
    frame = home / "pyvenv.cfg"
    frame.write_text(frame.read_text().replace("/usr/bin", str(Path(sys._base_executable).parent)))
    program = "import json, sys, only_here; print(json.dumps([sys.prefix, only_here.HERE, sys.path]))"
    said = subprocess.run([home / "bin/python", "-I", "-c", program], capture_output=True, text=True, check=True).stdout
    prefix, here, path = json.loads(said)

    assert (prefix, here) == (str(home), True)
    assert [entry for entry in path if "site-packages" in entry] == [
        str(home / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    ]


def test_the_package_asks_for_pythons_that_it_has_modules_for() -> None:
    asked = site_packages.dependencies()["qgpu:Python"]
    newest = int(site_packages.PYTHONS[-1].removeprefix("3."))

    assert asked.startswith(f"python3 (>= {site_packages.PYTHONS[0]}~) | python{site_packages.PYTHONS[0]},")
    assert asked.endswith(f"python3 (<< 3.{newest + 1}~)")
