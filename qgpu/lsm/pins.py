"""Where the programs are pinned, so that they outlive whoever loaded them: put there, replaced, taken away.

    VERSION/maps/NAME          what the programs know; the next programs go on with it
    VERSION/links-DIGEST/NAME  each program's hold on its hook; DIGEST is the object's

A folder of links gets that name when all are in it, so it is whole. Programs are replaced with no moment between: the
new ones are attached beside the old ones, on the same maps, before those go. VERSION is that of the maps; another one's
programs stay beside ours until there are no pods, for they know files that ours do not.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from qgpu.lsm import libbpf

DIRECTORY = Path("/sys/fs/bpf/qgpu")
VERSION = "1"
_NEW = "new-"


def maps(directory: Path = DIRECTORY) -> Path:
    """Return the folder of the maps."""
    return directory / VERSION / "maps"


def links(directory: Path = DIRECTORY) -> list[Path]:
    """List the folders of links that are whole: one, but for a moment."""
    return sorted((directory / VERSION).glob("links-*"))


def install(compiled: Path, directory: Path = DIRECTORY) -> bool:
    """Have the programs of a compiled object enforced, in place of any others; whether there were none.

    Raises OSError, NotSupportedError; those that were enforced still are.
    """
    digest = hashlib.sha256(compiled.read_bytes()).hexdigest()[:16]
    home, wanted = directory / VERSION, directory / VERSION / f"links-{digest}"
    before = links(directory)
    if wanted in before:
        _clear([path for path in before if path != wanted])
        return False
    if not before and home.exists():  # addresses of files whose end nobody saw
        _clear([home])
    new = home / f"{_NEW}{digest}"
    _clear([new])
    maps(directory).mkdir(parents=True, exist_ok=True)
    new.mkdir()
    try:
        with libbpf.opened(compiled) as found:
            names = found.skip_unknown_hooks()
            found.pin_maps(maps(directory))
            found.load()
            for name in names:  # in the order of the source: what forgets first, what notes last
                found.attach(name, new / name)
        new.rename(wanted)
    except OSError:
        _clear([new] if before else [home])
        raise
    _clear(before)
    return not before


def remove(directory: Path = DIRECTORY) -> None:
    """Take the programs out of the kernel, of every version. The folder may be a service's mount: then it stays."""
    with suppress(FileNotFoundError):
        _clear(list(directory.iterdir()))
    with suppress(OSError):
        directory.rmdir()


def _clear(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
