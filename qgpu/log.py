"""The format of the daemon's log on stderr: text on a terminal, JSON elsewhere.

Under systemd each line begins with its level as in sd-daemon(3), so that ``journalctl -p`` works.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

from qgpu import changes
from qgpu.config import LogFormat, LogLevel
from qgpu.ipc.systemd import to_journal
from qgpu.linux.log_file import LogFile
from qgpu.linux.log_rate_limit import LogRateLimit

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure(level: LogLevel, look: LogFormat) -> None:
    """Set up structlog for the process."""
    as_text = look is LogFormat.TEXT or (look is LogFormat.AUTO and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if as_text else structlog.processors.JSONRenderer()
    readable = [_readable] if as_text else []
    structlog.configure(
        processors=[
            LogRateLimit(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *readable,
            _prefixed(renderer) if to_journal() else renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.value.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", LogFile(sys.stderr))),
    )


def _readable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Write the origin and content of a change as ``qgpuctl events`` does."""
    if isinstance(event.get("by"), dict):
        event["by"] = changes.who(event["by"])
        if "grants" in event:
            event["grants"] = changes.granted(event["grants"])
        if "new" in event:
            event["change"] = changes.changed(event.pop("old"), event.pop("new"))
    return event


def _prefixed(renderer: Any) -> Any:
    def render(logger: Any, method: str, event: dict[str, Any]) -> str:
        return f"<{_PRIORITIES[event['level']]}>{renderer(logger, method, event)}"

    return render
