"""How the daemon's log lines look: text for people at a terminal, JSON for everything else. Always on stderr."""

from __future__ import annotations

import logging
import sys

import structlog

from qgpu.config import LogFormat, LogLevel


def configure(level: LogLevel, look: LogFormat) -> None:
    """Set up structlog for the process."""
    as_text = look is LogFormat.TEXT or (look is LogFormat.AUTO and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if as_text else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.value.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
