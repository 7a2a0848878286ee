"""Settings made at run time, kept for the next daemon in a small versioned file that is replaced atomically.

The file holds what ``qgpuctl gpu policy set`` changed, by the card's UUID. It holds no grants: the plane keeps those
(the module in the kernel, the guardian in its process) and a new daemon asks it. A setting made at run time holds
until the configuration of that pGPU changes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from qgpu.config import GpuSettings
from qgpu.errors import AlreadyRunningError, InvalidValueError, QgpuError, UnknownNameError, full, unusable
from qgpu.linux import atomic_file, lock_file

_log = structlog.get_logger("settings_file")

VERSION = 1

#: Not a name in the runtime directory, which may be the same one.
_LOCK = "state.lock"


class SettingsFile:
    """The file ``state.json`` of one state directory; without a directory nothing is kept.

    Raises a QgpuError if the directory cannot be used.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / "state.json" if directory else None
        self._gpus: dict[str, tuple[GpuSettings, GpuSettings]] = {}
        self._lock: int | None = None
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if self._path.exists():
                self._gpus = _read(json.loads(self._path.read_text()))
        except OSError as error:
            raise unusable(self._path, "choose another --state-dir", error) from error
        except (ValueError, RecursionError, UnknownNameError) as error:
            _log.error("state file unusable, using the configuration", file=str(self._path), reason=str(error))

    def hold(self) -> None:
        """Lock the directory: two daemons would overwrite each other's settings.

        Where the lock's file cannot be made because nothing can be written there, no setting can be kept either.
        Raises AlreadyRunningError, InvalidValueError, PermissionDeniedError.
        """
        if self._path is None:
            return
        directory = self._path.parent
        try:
            self._lock = lock_file.lock(directory / _LOCK)
        except BlockingIOError:
            raise AlreadyRunningError(
                f"{directory}: another qgpud keeps its settings there; choose another --state-dir"
            ) from None
        except OSError as error:
            if os.access(directory, os.W_OK) and not full(error):
                raise unusable(directory / _LOCK, "choose another --state-dir", error) from error
        if self._lock is None or not os.access(directory, os.W_OK):
            _log.warning("state directory cannot be written: settings cannot change", directory=str(directory))

    def close(self) -> None:
        """Let another daemon have the directory."""
        if self._lock is not None:
            os.close(self._lock)

    def settings(self, uuid: str, configured: GpuSettings) -> GpuSettings:
        """Return a card's settings: those last set, if the configuration has not changed since; else ``configured``."""
        kept, over = self._gpus.get(uuid, (configured, configured))
        if over == configured:
            return kept
        _log.info("configuration changed, dropping the setting made at run time", gpu=uuid)
        return configured

    @property
    def directory(self) -> Path | None:
        """Return where settings are kept; None if they end with this daemon."""
        return self._path and self._path.parent

    def keep(self, uuid: str, configured: GpuSettings, settings: GpuSettings) -> None:
        """Save a card's settings. Raises QgpuError if that is impossible, as on a full disk."""
        gpus = {known: pair for known, pair in self._gpus.items() if known != uuid}
        if settings != configured:
            gpus[uuid] = (settings, configured)
        if self._path is not None:
            content = {"version": VERSION, "gpus": {each: _written(*pair) for each, pair in gpus.items()}}
            try:
                atomic_file.replace(self._path, json.dumps(content, indent=2) + "\n", 0o644)
            except OSError as error:
                raise QgpuError(
                    f"{self._path}: {error.strerror}; nothing was changed, because the next daemon would not know it; "
                    f"{'free some space' if full(error) else 'qgpud must be able to write'} there"
                ) from error
        self._gpus = gpus


def _read(content: Any) -> dict[str, tuple[GpuSettings, GpuSettings]]:
    """Check and convert the file's content. Raises ValueError."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise InvalidValueError(f"it is not of version {VERSION}")
    try:
        return {
            str(uuid): (GpuSettings(**pair["set"]), GpuSettings(**pair["over"]))
            for uuid, pair in content["gpus"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidValueError(f"not what qgpud writes: {error!r}") from error


def _written(settings: GpuSettings, configured: GpuSettings) -> dict[str, Any]:
    return {"set": asdict(settings), "over": asdict(configured)}
