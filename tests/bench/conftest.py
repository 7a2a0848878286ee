"""The benchmarks are scripts in a folder, not a package: they find each other the way they do when run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
