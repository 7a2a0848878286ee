"""Reads the daemon's configuration file: TOML becomes one frozen value, or one error line if anything is wrong.

It defines the keys and their bounds. The daemon applies them; admission checks whether grants fit.
"""

from __future__ import annotations

import grp
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from qgpu import toml_tables, units
from qgpu.errors import InvalidValueError
from qgpu.ipc.http_server import Address, parse_address
from qgpu.model import (
    MAX_MEMORY_OVERCOMMIT,
    MAX_OFFLINE_FLOOR,
    MAX_PERIOD_NS,
    MIN_PERIOD_NS,
    NS_PER_MS,
    ContainerPolicy,
    PodClass,
    RequestBounds,
)
from qgpu.model.plane_names import Plane
from qgpu.policies import registry
from qgpu.toml_tables import Table


class LogFormat(StrEnum):
    """The format of log lines; ``auto`` is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    """The lowest level of log lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class DeviceFiles(StrEnum):
    """Whether the BPF program isolates pods' device files, if the kernel can run it."""

    AUTO = "auto"
    OFF = "off"


class MetricsCompat(StrEnum):
    """Another project's metric names to serve besides qgpu's own."""

    NONE = "none"
    HAMI = "hami"


@dataclass(frozen=True, slots=True)
class Metrics:
    """The address of the metrics endpoint, if any, and its names."""

    listen: Address | None = None
    compat: MetricsCompat = MetricsCompat.NONE


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """The settings of one pGPU: policy of offline pods, policy of online pods, period, floor, memory overcommit."""

    policy: str = "burst-share"
    online_policy: str = "best-effort"
    period_ns: int = 100 * NS_PER_MS
    #: Per cent of the GPU that all offline pods together get even under endless online work.
    offline_floor: int = 0
    #: How many times its memory may be granted; above 1, offline pods take turns in it.
    memory_overcommit: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", registry.find(self.policy))
        object.__setattr__(self, "online_policy", registry.find(self.online_policy))
        for name in ("period_ns", "offline_floor"):
            if type(value := getattr(self, name)) is not int:
                raise InvalidValueError(f"{name} {value!r}: must be a whole number")
        if not MIN_PERIOD_NS <= self.period_ns <= MAX_PERIOD_NS:
            raise InvalidValueError(
                f"period {units.format_duration(self.period_ns)}: a period is "
                f"{units.format_duration(MIN_PERIOD_NS)} to {units.format_duration(MAX_PERIOD_NS)}"
            )
        if not 0 <= self.offline_floor <= MAX_OFFLINE_FLOOR:
            raise InvalidValueError(f"offline floor {self.offline_floor} %: a floor is 0 to {MAX_OFFLINE_FLOOR} %")
        if type(factor := self.memory_overcommit) not in (int, float) or not 1 <= factor <= MAX_MEMORY_OVERCOMMIT:
            raise InvalidValueError(
                f"memory overcommit {factor!r}: a pGPU's memory is granted 1 to {MAX_MEMORY_OVERCOMMIT} times"
            )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the file; every default works."""

    plane: Plane = Plane.AUTO
    #: Permissions of the control socket, and the group whose members may change things through it.
    socket_mode: int = 0o666
    socket_gid: int | None = None
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.AUTO
    metrics: Metrics = field(default_factory=Metrics)
    #: The directory of the CDI file; "off" for no file, "auto" for the default directory if the pGPUs are real.
    cdi: str = "auto"
    containers: ContainerPolicy = field(default_factory=ContainerPolicy)
    device_files: DeviceFiles = DeviceFiles.AUTO
    #: The most host memory for all suspended pods together, in bytes; None: all that is available.
    suspended_memory: int | None = None
    defaults: GpuSettings = field(default_factory=GpuSettings)
    #: By number or UUID.
    gpus: Mapping[int | str, GpuSettings] = field(default_factory=dict)
    #: The cards in MIG mode whose instances are shared, by number or UUID.
    mig: frozenset[int | str] = frozenset()

    def gpu(self, index: int, uuid: str = "") -> GpuSettings:
        """Return the settings of one pGPU. A table for its UUID comes before one for its number."""
        return self.gpus.get(uuid, self.gpus.get(index, self.defaults))


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError with file, key and remedy."""
    top = toml_tables.read(path)
    top.only("plane", "device_files", "suspended_memory", "socket", "log", "metrics", "containers", "defaults", "gpu")
    socket, log, metrics, containers = (top.table(key) for key in ("socket", "log", "metrics", "containers"))
    socket.only("mode", "group")
    log.only("level", "format")
    metrics.only("listen", "compat")
    containers.only("cdi", *_ASKED, "environment")
    defaults = _gpu(top.table("defaults"), GpuSettings())
    gpus = top.table("gpu")
    tables = {_card(gpus, key): gpus.table(key) for key in gpus.raw}
    return Config(
        plane=top.text("plane", Plane.AUTO, partial(units.parse_choice, Plane)),
        device_files=top.text("device_files", DeviceFiles.AUTO, partial(units.parse_choice, DeviceFiles)),
        suspended_memory=top.text("suspended_memory", None, units.parse_memory),
        socket_mode=socket.text("mode", 0o666, _mode),
        socket_gid=socket.text("group", None, _group),
        log_level=log.text("level", LogLevel.INFO, partial(units.parse_choice, LogLevel)),
        log_format=log.text("format", LogFormat.AUTO, partial(units.parse_choice, LogFormat)),
        metrics=Metrics(
            metrics.text("listen", None, parse_address),
            metrics.text("compat", MetricsCompat.NONE, partial(units.parse_choice, MetricsCompat)),
        ),
        cdi=containers.text("cdi", "auto", _directory),
        containers=_container_policy(containers),
        defaults=defaults,
        gpus={card: _gpu(table, defaults) for card, table in tables.items()},
        mig=frozenset(card for card, table in tables.items() if table.text("mig", False, _mig)),
    )


#: The keys of a table that says how pods share a pGPU's time.
GPU_KEYS = ("policy", "online_policy", "period", "offline_floor")


def gpu_settings(table: Table, base: GpuSettings) -> GpuSettings:
    """Read how a pGPU's time is shared; missing keys are as in ``base``. Raises ConfigError."""
    policy = table.text("policy", base.policy, registry.find)
    online_policy = table.text("online_policy", base.online_policy, registry.find)
    period_ns = table.text("period", base.period_ns, units.parse_duration)
    floor = table.text("offline_floor", base.offline_floor, units.parse_percent)
    kept = table.check("period", lambda: replace(base, policy=policy, online_policy=online_policy, period_ns=period_ns))
    return table.check("offline_floor", lambda: replace(kept, offline_floor=floor))


#: The keys of a table that bounds what containers may ask for.
_ASKED = ("classes", "max_cores", "max_memory")


def _container_policy(table: Table) -> ContainerPolicy:
    usual = ContainerPolicy()
    environment = table.table("environment")
    environment.only(*_ASKED, "names", "enabled")
    enabled = environment.text("enabled", True, _yes_or_no)
    by_environment = _may_ask(environment, usual.by_environment or RequestBounds())
    return ContainerPolicy(_may_ask(table, usual.from_anywhere), by_environment if enabled else None)


def _may_ask(table: Table, base: RequestBounds) -> RequestBounds:
    return RequestBounds(
        table.text("classes", base.classes, _classes),
        table.text("max_cores", base.cores, _quota),
        table.text("max_memory", base.memory, units.parse_memory_limit),
        table.text("names", base.name, _yes_or_no),
    )


def _gpu(table: Table, base: GpuSettings) -> GpuSettings:
    table.only(*GPU_KEYS, "memory_overcommit", *(("mig",) if table.where != "defaults" else ()))
    factor = table.text("memory_overcommit", base.memory_overcommit, units.parse_factor)
    shared = gpu_settings(table, base)
    return table.check("memory_overcommit", lambda: replace(shared, memory_overcommit=factor))


def _card(gpus: Table, key: str) -> int | str:
    if re.fullmatch(r"0|[1-9][0-9]{0,3}", key):
        return int(key)
    if not re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z-]{1,60}", key):
        raise gpus.error(key, "a pGPU is named by its number, as in [gpu.0], or by its UUID, as in [gpu.GPU-…]")
    return key


def _mig(text: str) -> bool:
    if text not in ("leave", "share"):
        raise InvalidValueError(f"{text!r}: write leave, or share for the instances of a card in MIG mode")
    return text == "share"


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise InvalidValueError(f'{text!r}: write file permissions in octal, as in "0660"')
    return mode


def _classes(text: str) -> frozenset[PodClass]:
    return frozenset(units.parse_choice(PodClass, word) for word in text.replace(",", " ").split())


def _quota(text: str) -> int:
    if not 1 <= (cores := units.parse_percent(text)) <= 100:
        raise InvalidValueError(f"{text!r}: a quota is 1% to 100%")
    return cores


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise InvalidValueError(f"{text!r}: write yes or no")
    return text == "yes"


def _directory(text: str) -> str:
    if text not in ("auto", "off") and not Path(text).is_absolute():
        raise InvalidValueError(f"{text!r}: write auto, off, or a directory such as /run/cdi")
    return text


def _group(text: str) -> int | None:
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise InvalidValueError(f"{text!r}: there is no such group on this host") from None
