"""The command line of a child that runs Python: the folder that its parent was started in gives it no code.

Root may run our programs in any folder, and ``python -m`` and ``python -c`` look for modules there first.
"""

from __future__ import annotations

import sys


def python(*words: str) -> list[str]:
    """Return this interpreter with arguments; isolated if we are (-I), else with our environment (-P)."""
    return [sys.executable, "-I" if sys.flags.isolated else "-P", *words]
