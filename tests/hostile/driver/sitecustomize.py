"""Puts an emulated driver under the daemon and the guardian of whoever has this folder on PYTHONPATH."""

from __future__ import annotations

import sys

if "qgpu.guardian" in sys.orig_argv or "qgpu.daemon.main" in sys.orig_argv:
    from tests.hostile import emulated

    emulated.install()
