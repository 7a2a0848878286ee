"""Puts what tests need under the daemon and the guardian of whoever has this folder on PYTHONPATH.

That is an emulated driver, and steps at which they die.
"""

from __future__ import annotations

import os
import sys

if "qgpu.guardian" in sys.orig_argv or "qgpu.daemon.main" in sys.orig_argv:
    if "DEATHS" in os.environ:
        from tests.runtime import deaths

        deaths.install()
    if "EMULATED_RM" in os.environ:
        from tests.hostile import emulated

        emulated.install()
