"""Write the manual pages: manpages.py VERSION DIRECTORY. The pages are made by qgpu/manual.py."""

from __future__ import annotations

import sys
from pathlib import Path

from qgpu import manual

if __name__ == "__main__":
    manual.write(sys.argv[1], Path(sys.argv[2]))
