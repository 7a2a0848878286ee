from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Ended(NamedTuple):
    code: int
    result: dict[str, Any]
    stderr: str
    driver: dict[str, int]


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-O1", "-pthread", "-shared", "-fPIC", "-o", library, source], check=True
    )
    return library


@pytest.fixture
def load_env(libcuda: Path, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QGPU_")}
    return {**kept, "QGPU_LIBCUDA": str(libcuda), "FAKE_CUDA_LOG": str(tmp_path / "driver.json")}


@pytest.fixture
def load(load_env: dict[str, str], tmp_path: Path) -> Callable[..., Ended]:
    def run(*arguments: str, **environment: str) -> Ended:
        ended = subprocess.run(
            [sys.executable, "-m", "qgpu.load.main", *arguments],
            env={**load_env, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        log = tmp_path / "driver.json"
        return Ended(
            ended.returncode,
            json.loads(ended.stdout) if ended.stdout else {},
            ended.stderr,
            json.loads(log.read_text()) if log.exists() else {},
        )

    return run
