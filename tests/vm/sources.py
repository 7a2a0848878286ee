"""Sources copied to where they are built: what changed there is newer than what was built of it, whatever its date.

A checkout of an older commit, a copy that keeps dates and a source that is gone would each leave make with an object
that looks current. So a file is written only where its bytes differ, with the date of now; and what the build folder
got from an earlier copy and the source no longer has is removed. Each checkout builds in a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

#: In a build folder: the names of what was copied there.
_LIST = ".copied.json"
_BUILT = {".o", ".ko", ".mod", ".cmd", ".a", ".order", ".symvers"}


def folder(cache: Path, checkout: Path, name: str) -> Path:
    """Return where this checkout builds for the kernel of this name."""
    mark = hashlib.sha256(str(checkout.resolve()).encode()).hexdigest()[:8]
    return cache / "build" / f"{checkout.name}-{mark}" / name


def mirror(source: Path, into: Path, change: Callable[[str, bytes], bytes] = lambda _, data: data) -> None:
    """Make the sources in ``into`` those of ``source``; ``change`` gets each one's relative name and bytes."""
    names = list(_files(source))
    listed = into / _LIST
    before = json.loads(listed.read_text()) if listed.exists() else []
    for name in set(before) - set(names):
        (into / name).unlink(missing_ok=True)
    for name in names:
        data, to = change(name, (source / name).read_bytes()), into / name
        if to.exists() and to.read_bytes() == data:
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        to.write_bytes(data)
        to.chmod((source / name).stat().st_mode)
    listed.write_text(json.dumps(names))


def digest(*paths: Path) -> str:
    """Return a name for these files, and the sources in these folders: the same one for the same names and bytes."""
    seen = hashlib.sha256()
    for source in paths:
        for name in _files(source) if source.is_dir() else ("",):
            data = (source / name).read_bytes()
            seen.update(f"{source.name}/{name} {len(data)}\n".encode() + data)
    return seen.hexdigest()[:16]


def _files(source: Path) -> Iterator[str]:
    """Yield the relative names of what is no output of a build made in place."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.suffix not in _BUILT and not path.name.startswith(".") and ".mod." not in path.name:
            yield str(path.relative_to(source))
