"""Measure on this machine what qgpu promises, through qgpud, qgpuctl and qgpu-load.

    python bench/spine.py                 # all of it, about five minutes on a GPU (as root)
    python bench/spine.py --plane sim     # the same on a simulated pGPU: a rehearsal
    python bench/spine.py --only burst,online --quick

Sections are independent: each starts its own daemon and pods, and if one fails the others still run. Results go to
docs/results as JSON (figures) and Markdown (with requirement and spread).
"""

from __future__ import annotations

import sys

from script import run
from spine_life import alone, gated_kill, kill9, restart
from spine_online import online
from spine_shares import best_effort, burst, fixed, gaps, shares

SECTIONS = {
    section.__name__: section
    for section in (burst, gaps, online, alone, fixed, shares, best_effort, kill9, gated_kill, restart)
}

if __name__ == "__main__":
    sys.exit(run("spine", SECTIONS, __doc__ or ""))
