"""The whole suite: every claim beside its rivals, in one run.

    python bench/suite.py                     # on a GPU, as root: about fourteen minutes
    python bench/suite.py --plane sim         # the same on a simulated pGPU, without rivals
    python bench/suite.py --only a,c          # claims by letter, or sections by name

Each section writes its results when it ends; ``python bench/report.py FOLDER`` makes a page of them.
"""

from __future__ import annotations

import batch_curve
import colocation
import convergence
import daemon_cost
import harvest
import online_latency
import share_error
import stability
from script import EVERY, claim

_CLAIMS = (batch_curve, share_error, online_latency, colocation, convergence, harvest, daemon_cost, stability)

if __name__ == "__main__":
    sections = {name: section for each in _CLAIMS for name, section in each.SECTIONS.items()}
    claim({name: section for name, section in sections.items() if name in EVERY}, __doc__)
