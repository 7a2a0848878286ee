"""Measure on this machine what qgpu guarantees, through qgpud, qgpuctl and qgpu-load: shares, latency, cost, recovery.

    python bench/guarantees.py                 # all of it, about five minutes on a GPU (as root)
    python bench/guarantees.py --plane sim     # the same on a simulated pGPU: a rehearsal
    python bench/guarantees.py --only burst,online --quick

Sections are independent: each starts its own daemon and pods, and if one fails the others still run. Results go to
docs/results as JSON (figures) and Markdown (with requirement and spread).
"""

from __future__ import annotations

import sys

from alone import alone
from guarantees_online import online
from guarantees_recovery import gated_kill, kill9, restart
from guarantees_shares import best_effort, burst, fixed, gaps, shares
from script import run

SECTIONS = {
    section.__name__: section
    for section in (burst, gaps, online, alone, fixed, shares, best_effort, kill9, gated_kill, restart)
}

if __name__ == "__main__":
    sys.exit(run("guarantees", SECTIONS, __doc__ or ""))
