"""The whole suite: every claim beside its rivals, in one run.

    python bench/suite.py                     # on a GPU, as root: under nine minutes
    python bench/suite.py --plane sim         # the same on a simulated pGPU; no rivals there
    python bench/suite.py --only a,c          # claims by letter, or sections by name

Each section writes its results as soon as it has them; ``python bench/report.py FOLDER`` makes a page of them.
"""

from __future__ import annotations

import batch_curve
from script import claim

if __name__ == "__main__":
    claim({**batch_curve.SECTIONS}, __doc__)
