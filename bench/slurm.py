"""Slurm's versions in which every case of tests/slurm passes.

    bench/slurm.py [--versions 22.05,26.05] [--out docs/results/slurm.json]

Fetches Debian's packages of each version into the cache, and runs slurmctld, two slurmds and two qgpud with simulated
GPUs from them. Needs root, mmdebstrap and make; no GPU. About a minute a version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.slurm.cluster import RELEASES  # noqa: E402  (bench is a folder of scripts)


def cases(version: str) -> dict[str, Any]:
    """Run all cases on a version; return how many passed and failed, by pytest's own report."""
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slurm", "tests/slurm"]
        started = time.monotonic()
        subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=ROOT,
            env=os.environ | {"QGPU_SLURM": version},
            stdout=sys.stderr,
            check=False,
        )
        seconds = time.monotonic() - started
        suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - of our own pytest
    assert suite is not None
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    passed = int(suite.attrib["tests"]) - failed - int(suite.attrib["skipped"])
    return {"passed": passed, "failed": failed, "seconds": round(seconds)}


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=",".join(RELEASES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/slurm.json")
    arguments = parser.parse_args()
    versions = arguments.versions.split(",")
    found = {version: cases(version) for version in versions}
    good = [version for version, counts in found.items() if counts["passed"] and not counts["failed"]]
    figures = {"slurm_versions": len(good), "slurm_cases": min(counts["passed"] for counts in found.values())}
    result = {
        "command": "bench/slurm.py",
        "date": time.strftime("%Y-%m-%d"),
        "plane": "sim",
        "figures": figures,
        "versions": found,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if len(good) == len(versions) else 1


if __name__ == "__main__":
    sys.exit(main())
