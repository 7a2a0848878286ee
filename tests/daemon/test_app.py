"""What the daemon does around its parts."""

from __future__ import annotations

import gc
import threading
from typing import Any, cast

from qgpu.daemon import app


def test_no_search_for_garbage_looks_at_what_start_made() -> None:
    nothing, stop = cast("Any", None), threading.Event()
    stop.set()
    before = gc.get_freeze_count()
    try:
        app._watch(nothing, nothing, nothing, nothing, nothing, cast("Any", stop), nothing)
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
