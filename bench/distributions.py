"""How many distributions the packages work on, and what the first command costs; into docs/results/operator.json.

    distributions.py [--only ubuntu-22.04,...]
    distributions.py --paste [--only ubuntu-22.04,...]
    distributions.py --services
    distributions.py --demo

The packages must lie in dist/ (make packages). Results of distributions that are not named are kept. ``--paste`` pastes
every block of README and docs/install.md that a container can run into one on each distribution, and says why it leaves
out the others; it also needs the wheel in dist/. ``--services`` counts what ``make check`` changes of a machine's
services when root installs what it needs. ``--demo`` runs ``make demo`` in a new clone of this tree, and measures its
time and the size of its ``.venv``.
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

import host_figures

ROOT = Path(__file__).resolve().parent.parent
FILE = host_figures.FILE.with_name("operator.json")
sys.path.append(str(ROOT / "tests/vm/host"))


def on_distributions(only: list[str]) -> dict[str, Any]:
    """Install, use and remove the packages on each distribution; the figures of these and of those tried before."""
    import distributions_lane

    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    found: dict[str, Any] = kept.get("figures", {}).get("on_distributions", {})
    for name in only or distributions_lane.DISTRIBUTIONS:
        found[name] = distributions_lane.tried(name, ROOT / "dist")
    good = [each for each in found.values() if not each["failed"]]
    left = sum(len(each.get("left", ())) for each in found.values())
    return {"distributions": len(good), "left_behind": left, "on_distributions": found}


def pasted_on(only: list[str]) -> dict[str, Any]:
    """Paste the documents' blocks on each distribution; the figures of these and of those tried before."""
    import distributions_lane
    import pasting_guest

    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    found: dict[str, Any] = kept.get("figures", {}).get("pasted_on", {})
    for name in only or distributions_lane.DISTRIBUTIONS:
        found[name] = distributions_lane.pasted(name, ROOT / "dist")
    blocks = sum(each.get("pasted", 0) for each in found.values())
    failed = sum(len(each["failed"]) for each in found.values())
    left_out = [
        {"block": f"{document}: {first.strip()}", "reason": reason}
        for (document, first), reason in pasting_guest.LEFT_OUT.items()
    ]
    return {
        "pasted_blocks": blocks,
        "pasted_blocks_failed": failed,
        "pasted_blocks_left_out": left_out,
        "pasted_on": found,
    }


def services() -> dict[str, Any]:
    """Install what ``make check`` installs as root, in a clean Debian; what it changed of the machine's services."""
    import distributions_lane

    found = distributions_lane.tools()
    if found["failed"]:
        sys.exit(f"not measured: {', '.join(found['failed'])}")
    return {
        "services_changed": len(found["changed"]),
        "services_watched": found["watched"],
        "services_changed_by_name": found["changed"],
    }


def demo() -> dict[str, Any]:
    """Run the demo in a new clone; its seconds, and the size of its virtual environment in MB (10^6 bytes)."""
    with tempfile.TemporaryDirectory(prefix="qgpu-demo.") as place:
        tree = Path(place) / "qgpu"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        # like a user's shell: without this program's own environment
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "QGPU_"))}
        started = time.monotonic()
        subprocess.run(["make", "demo"], cwd=tree, env=environment, check=True)
        seconds = time.monotonic() - started
        blocks = sum(path.lstat().st_blocks for path in (tree / ".venv").rglob("*"))
    return {"demo_seconds": round(seconds), "demo_venv_mb": round(blocks * 512 / 1e6)}


def main() -> None:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="distributions, with commas between them")
    parser.add_argument("--paste", action="store_true", help="paste the documents' blocks instead")
    parser.add_argument("--services", action="store_true", help="look at what make check installs instead")
    parser.add_argument("--demo", action="store_true", help="measure the demo instead")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    if arguments.demo:
        figures, command = demo(), "python bench/distributions.py --demo"
    elif arguments.services:
        figures, command = services(), "python bench/distributions.py --services"
    elif arguments.paste:
        figures, command = pasted_on(only), "python bench/distributions.py --paste"
    else:
        figures, command = on_distributions(only), "python bench/distributions.py"
    print(json.dumps(figures, indent=2))
    host_figures.keep(command, "2 CPUs, no GPU", figures, FILE)


if __name__ == "__main__":
    main()
