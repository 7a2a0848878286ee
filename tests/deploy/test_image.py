"""The driver's image, as far as it shows without a registry: it copies what the package is built from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.deploy.tools import ROOT

TEXT = (ROOT / "deploy/Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copied() -> set[Path]:
    """Return what the build stage copies from the tree."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE)
    return {Path(word) for line in lines for word in line.split()}


def test_the_image_copies_what_exists() -> None:
    assert copied()
    assert [path for path in copied() if not (ROOT / path).exists()] == []


def test_the_image_copies_all_that_the_package_is_built_from() -> None:
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    hooks = [hook["path"] for hook in wheel["hooks"].values()]
    needed = [project["readme"], *project["license-files"], *wheel["packages"], *wheel["force-include"], *hooks]

    assert [name for name in needed if not any(Path(name).is_relative_to(path) for path in copied())] == []


def test_the_image_starts_the_driver() -> None:
    (program,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', TEXT, re.MULTILINE)

    assert program == "qgpu-k8s"
    assert "'/src[k8s]'" in TEXT
