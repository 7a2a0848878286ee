"""Where the BPF programs are pinned, so that they outlive their loader: installed, replaced, removed.

    VERSION/maps/NAME          the programs' data; the next programs continue with it
    VERSION/links-DIGEST/NAME  each program's attachment to its hook; DIGEST is the object's

A folder of links gets its final name when all links are in it, so it is complete. Programs are replaced without a gap:
the new ones are attached beside the old ones, on the same maps, before the old ones are removed. VERSION is the maps'
version. Programs of another version stay beside ours until there are no pods, because they know files that ours do not.
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
    """List the complete folders of links; more than one exists only during a replacement."""
    return sorted((directory / VERSION).glob("links-*"))


def install(compiled: Path, directory: Path = DIRECTORY) -> bool:
    """Install the programs of a compiled object in place of any others; return whether there were none.

    Raises OSError, NotSupportedError; the old programs then stay installed.
    """
    digest = hashlib.sha256(compiled.read_bytes()).hexdigest()[:16]
    home, wanted = directory / VERSION, directory / VERSION / f"links-{digest}"
    before = links(directory)
    if wanted in before:
        _clear([path for path in before if path != wanted])
        return False
    if not before and home.exists():  # addresses of files that were closed while no program ran
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
            for name in names:  # in source order: programs that forget files first, those that record them last
                found.attach(name, new / name)
        new.rename(wanted)
    except OSError:
        _clear([new] if before else [home])
        raise
    _clear(before)
    return not before


def remove(directory: Path = DIRECTORY) -> None:
    """Remove the programs of every version from the kernel. The folder stays if it is a service's mount."""
    with suppress(FileNotFoundError):
        _clear(list(directory.iterdir()))
    with suppress(OSError):
        directory.rmdir()


def _clear(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
