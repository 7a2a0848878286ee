"""docs/results/host.json: figures of a host's parts, each written by the script that measured it."""

from __future__ import annotations

import fcntl
import json
from datetime import date
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "docs" / "results" / "host.json"


def keep(command: str, device: str, figures: dict[str, Any], file: Path = FILE) -> None:
    """Put figures into the file beside what others put there, each with how it was had."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        kept: dict[str, Any] = json.loads(stream.read() or "{}")
        kept["figures"] = kept.get("figures", {}) | figures
        how = {"device": device, "date": date.today().isoformat(), "figures": sorted(figures)}
        kept["how"] = kept.get("how", {}) | {command: how}
        stream.truncate(0)
        stream.write(json.dumps(kept, indent=2) + "\n")
