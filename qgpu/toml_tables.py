"""A TOML file, table by table: each knows where it stands, so that every complaint names the file and the key.

What the tables of a file may hold is decided by who reads it.
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
        """Make an error that names the file and a key of this table; the table itself where ``key`` is empty."""
        return ConfigError(f"{self.file}: {self._at(key)}: {what}")

    def only(self, *keys: str) -> None:
        """See that there are no other keys. Raises ConfigError."""
        for key in self.raw:
            if key not in keys:
                raise self.error(key, f"no such key; known here: {', '.join(keys)}")

    def text(self, key: str, default: _T, read: Callable[[str], _T]) -> _T:
        """Read a value that is written as a string. Raises ConfigError."""
        if key not in self.raw:
            return default
        value = self.raw[key]
        if not isinstance(value, str):
            raise self.error(key, f"write it as a string, not as {value!r}")
        if "\0" in value:
            raise self.error(key, "write it without a zero byte")
        return self.check(key, lambda: read(value))

    def check(self, key: str, make: Callable[[], _T]) -> _T:
        """Make a value, and name the key if that is refused. Raises ConfigError."""
        try:
            return make()
        except QgpuError as error:
            raise self.error(key, str(error)) from error

    def table(self, key: str) -> Table:
        """Return a table below this one; an empty one if it is not there. Raises ConfigError."""
        return self._below(key, self.raw.get(key, {}))

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables below this one. Raises ConfigError."""
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
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
