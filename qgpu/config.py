"""The configuration file of the daemon: TOML into one frozen value, or one clear line and nothing taken.

It decides what a configuration may say. What it means is left to the daemon; whether grants fit is left to
admission.
"""

from __future__ import annotations

import grp
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from qgpu import policies, units
from qgpu.errors import ConfigError, InvalidValueError, QgpuError
from qgpu.httpd import Address, parse_address
from qgpu.model import MAX_OFFLINE_FLOOR, MAX_PERIOD_NS, MIN_PERIOD_NS, NS_PER_MS

_T = TypeVar("_T")


class Plane(StrEnum):
    """By what means a pGPU is shared; ``auto`` takes the best there is."""

    AUTO = "auto"
    KMOD = "kmod"
    SECCOMP = "seccomp"
    SIM = "sim"


class LogFormat(StrEnum):
    """How log lines look; ``auto`` is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    """The least important log lines that are still written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class MetricsCompat(StrEnum):
    """Whose names metrics have beside qgpu's own."""

    NONE = "none"
    HAMI = "hami"


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where Prometheus finds metrics, if anywhere."""

    listen: Address | None = None
    compat: MetricsCompat = MetricsCompat.NONE


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """How one pGPU is shared: the policy of offline pods, that of online pods, the period, the offline floor."""

    policy: str = "burst-share"
    online_policy: str = "best-effort"
    period_ns: int = 100 * NS_PER_MS
    #: Per cent of the GPU that offline pods get together even if online work is unending.
    offline_floor: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", policies.find(self.policy))
        object.__setattr__(self, "online_policy", policies.find(self.online_policy))
        if not MIN_PERIOD_NS <= self.period_ns <= MAX_PERIOD_NS:
            raise InvalidValueError(
                f"period {units.format_duration(self.period_ns)}: a period is "
                f"{units.format_duration(MIN_PERIOD_NS)} to {units.format_duration(MAX_PERIOD_NS)}"
            )
        if not 0 <= self.offline_floor <= MAX_OFFLINE_FLOOR:
            raise InvalidValueError(f"offline floor {self.offline_floor} %: a floor is 0 to {MAX_OFFLINE_FLOOR} %")


@dataclass(frozen=True, slots=True)
class Config:
    """All that an operator may set in the file; every default is a working choice."""

    plane: Plane = Plane.AUTO
    #: Who may connect to the control socket at all, and the group whose members may change things through it.
    socket_mode: int = 0o666
    socket_gid: int | None = None
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.AUTO
    metrics: Metrics = field(default_factory=Metrics)
    #: The directory of the CDI file; "off" for none, "auto" for the usual one where there are real pGPUs.
    cdi: str = "auto"
    defaults: GpuSettings = field(default_factory=GpuSettings)
    gpus: Mapping[int, GpuSettings] = field(default_factory=dict)

    def gpu(self, index: int) -> GpuSettings:
        """Return the settings of one pGPU."""
        return self.gpus.get(index, self.defaults)


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError with the file, the key and what to do."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return _Reader(str(path)).config(data)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns a table into values, naming file and key in every complaint."""

    file: str

    def config(self, data: dict[str, Any]) -> Config:
        self._known(data, "", ("plane", "socket", "log", "metrics", "containers", "defaults", "gpu"))
        socket, log, metrics, containers = (
            self._table(data, key, key) for key in ("socket", "log", "metrics", "containers")
        )
        self._known(socket, "socket.", ("mode", "group"))
        self._known(log, "log.", ("level", "format"))
        self._known(metrics, "metrics.", ("listen", "compat"))
        self._known(containers, "containers.", ("cdi",))
        defaults = self._settings(self._table(data, "defaults", "defaults"), "defaults.", GpuSettings())
        gpus = self._table(data, "gpu", "gpu")
        return Config(
            plane=self._value(data, "plane", "", Plane.AUTO, Plane),
            socket_mode=self._value(socket, "mode", "socket.", 0o666, _mode),
            socket_gid=self._value(socket, "group", "socket.", None, _group),
            log_level=self._value(log, "level", "log.", LogLevel.INFO, LogLevel),
            log_format=self._value(log, "format", "log.", LogFormat.AUTO, LogFormat),
            metrics=Metrics(
                self._value(metrics, "listen", "metrics.", None, parse_address),
                self._value(metrics, "compat", "metrics.", MetricsCompat.NONE, MetricsCompat),
            ),
            cdi=self._value(containers, "cdi", "containers.", "auto", _directory),
            defaults=defaults,
            gpus={
                self._index(key): self._settings(self._table(gpus, key, f"gpu.{key}"), f"gpu.{key}.", defaults)
                for key in gpus
            },
        )

    def _settings(self, table: dict[str, Any], where: str, base: GpuSettings) -> GpuSettings:
        self._known(table, where, ("policy", "online_policy", "period", "offline_floor"))
        policy = self._value(table, "policy", where, base.policy, policies.find)
        online_policy = self._value(table, "online_policy", where, base.online_policy, policies.find)
        period_ns = self._value(table, "period", where, base.period_ns, units.parse_duration)
        floor = self._value(table, "offline_floor", where, base.offline_floor, units.parse_percent)
        try:
            base = replace(base, policy=policy, online_policy=online_policy, period_ns=period_ns)
        except InvalidValueError as error:
            raise self._error(f"{where}period", str(error)) from error
        try:
            return replace(base, offline_floor=floor)
        except InvalidValueError as error:
            raise self._error(f"{where}offline_floor", str(error)) from error

    def _value(self, table: dict[str, Any], key: str, where: str, default: _T, read: Callable[[str], _T]) -> _T:
        """Read a value that is written as a string; everything in this file is."""
        if key not in table:
            return default
        value = table[key]
        if not isinstance(value, str):
            raise self._error(where + key, f"write it as a string, not as {value!r}")
        try:
            return read(value)
        except QgpuError as error:
            raise self._error(where + key, str(error)) from error
        except ValueError as error:
            choices = ", ".join(read) if isinstance(read, type) and issubclass(read, StrEnum) else str(error)
            raise self._error(where + key, f"{value!r}: choose one of {choices}") from error

    def _table(self, table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
        value = table.get(key, {})
        if not isinstance(value, dict):
            raise self._error(where, f"must be a table, written [{where}]")
        return value

    def _known(self, table: dict[str, Any], where: str, keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                raise self._error(where + key, f"no such key; known here: {', '.join(keys)}")

    def _index(self, key: str) -> int:
        if not key.isdecimal():
            raise self._error(f"gpu.{key}", "a pGPU is named by its number, as in [gpu.0]")
        return int(key)

    def _error(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.file}: {key}: {what}")


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise InvalidValueError(f'{text!r}: write file permissions in octal, as in "0660"')
    return mode


def _directory(text: str) -> str:
    if text not in ("auto", "off") and not Path(text).is_absolute():
        raise InvalidValueError(f"{text!r}: write auto, off, or a directory such as /run/cdi")
    return text


def _group(text: str) -> int | None:
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise InvalidValueError(f"{text!r}: there is no such group on this host") from None
