"""Reads a TOML file table by table. Each table knows its place, so that every error names the file and the key.

The callers define which keys a table may have.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from qgpu.errors import ConfigError, QgpuError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a file."""

    file: str
    where: str
    raw: dict[str, Any]

    def error(self, key: str, what: str) -> ConfigError:
        """Return an error that names the file and a key of this table, or the table itself if ``key`` is empty."""
        return ConfigError(f"{self.file}: {self._at(key)}: {what}")

    def only(self, *keys: str) -> None:
        """Raise ConfigError if there are any other keys."""
        for key in self.raw:
            if key not in keys:
                raise self.error(key, f"no such key; known here: {', '.join(keys)}")

    def text(self, key: str, default: _T, read: Callable[[str], _T]) -> _T:
        """Read a string with ``read``, or return ``default`` if the key is missing. Raises ConfigError."""
        if key not in self.raw:
            return default
        value = self.raw[key]
        if not isinstance(value, str):
            raise self.error(key, f"write it as a string, not as {value!r}")
        if "\0" in value:
            raise self.error(key, "write it without a zero byte")
        return self.check(key, lambda: read(value))

    def check(self, key: str, make: Callable[[], _T]) -> _T:
        """Return ``make()``. If it refuses the value, raise a ConfigError that names the key."""
        try:
            return make()
        except QgpuError as error:
            raise self.error(key, str(error)) from error

    def table(self, key: str) -> Table:
        """Return a table inside this one, empty if it is missing. Raises ConfigError."""
        return self._below(key, self.raw.get(key, {}))

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables inside this one. Raises ConfigError."""
        value = self.raw.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be a list of tables, written [[{self._at(key)}]]")
        return [self._below(f"{key}[{number}]", each) for number, each in enumerate(value)]

    def _below(self, key: str, value: object) -> Table:
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table, written [{self._at(key)}]")
        return Table(self.file, self._at(key), value)

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where and key else self.where or key


def read(path: Path) -> Table:
    """Read a file. Raises ConfigError."""
    try:
        return Table(str(path), "", tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
