"""docs/results/host.json: figures of a host's parts, each from the script that measured it."""

from __future__ import annotations

import fcntl
import json
from datetime import date
from pathlib import Path
from typing import Any

from provenance import sources

FILE = Path(__file__).resolve().parent.parent / "docs" / "results" / "host.json"


def keep(command: str, device: str, figures: dict[str, Any], file: Path = FILE) -> None:
    """Add figures to the file and keep those of other scripts; each names how it was measured, and of which tree."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        kept: dict[str, Any] = json.loads(stream.read() or "{}")
        kept["figures"] = kept.get("figures", {}) | figures
        when = date.today().isoformat()
        how = {"device": device, "date": when, "sources": sources(), "figures": sorted(figures)}
        kept["how"] = kept.get("how", {}) | {command: how}
        stream.truncate(0)
        stream.write(json.dumps(kept, indent=2) + "\n")
