"""Install wheel and sdist from dist/, each into a new virtual environment, as docs/install.md says, and use them.

    check.py [--dist dist]

The daemon is started on a simulated pGPU with a runtime directory of its own; the virtual environments are removed
afterwards. This detects files that the tree has and an installed package lacks, and the other way round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import documents

import qgpu

ROOT = Path(__file__).resolve().parent.parent
#: Checks of the installed program without the tree: its data files, and the imports of every command.
USED = (
    "qgpuctl --version",
    "qgpuctl cdi profile --help",
    "qgpuctl man run | grep EXAMPLES",
    "qgpuctl completion bash | bash -n",
    "qgpuctl run --name one --cores 30 -- qgpu-load --duration 0s --kernel 1ms",
    "qgpuctl report --seconds 1 --out report.html",
    "qgpuctl trace --seconds 1 --out t.pftrace",
    'python -c \'import importlib.resources as r; assert (r.files("qgpu") / "data/qgpu.h").is_file()\'',
    'python -c \'import importlib.resources as r; assert (r.files("qgpu") / "data/device_files.bpf.o").is_file()\'',
)


def check(file: Path) -> None:
    """Run the document's commands with one of the files. Raises documents.Failed."""
    (block,) = (each for each in documents.blocks(ROOT) if each.runner == "wheel")
    with tempfile.TemporaryDirectory(prefix="qgpu-check.") as name:
        place = Path(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("QGPU_", "PYTHON"))}
        environment |= {"QGPU_RUNTIME_DIR": str(place / "run"), "PATH": f"{place}/qgpu/bin:{environment['PATH']}"}
        as_here = {
            r"/opt/qgpu": str(place / "qgpu"),
            r"dist/qgpu-\*\.whl": str(file),
            r"^\S*qgpud &": f"{place}/qgpu/bin/qgpud --plane sim &",
        }
        also = documents.Block(block.document, block.line, "", block.runner, (*block.commands, *USED))
        documents.run(also, place, environment, as_here)


def main() -> None:
    """Check both, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    dist = parser.parse_args().dist.resolve()
    started = time.monotonic()
    for name in (f"qgpu-{qgpu.__version__}-py3-none-any.whl", f"qgpu-{qgpu.__version__}.tar.gz"):
        check(dist / name)
        print(f"{name}: installed and used as documented")
    print(f"checked in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
