"""The metrics endpoint as the daemon keeps it: another program at its address keeps no daemon from starting.

On a host's own addresses any user may listen. So where the address is taken, that is said, and tried again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import structlog

from qgpu.errors import ConfigError
from qgpu.ipc.http_server import HttpServer

_log = structlog.get_logger("metrics")

#: How long to wait before another try.
_AGAIN_S = 2.0


class MetricsEndpoint:
    """Serves when it can."""

    def __init__(self, serve: Callable[[], HttpServer]) -> None:
        """Begin to serve. Raises ConfigError for an address that is never to be had."""
        self._serve = serve
        self._server: HttpServer | None = None
        self._again_s = 0.0
        self._told = False
        self.refresh()

    def refresh(self) -> None:
        """Try again if that is due. Raises ConfigError as at first."""
        if self._server is not None or time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _AGAIN_S
        try:
            self._server = self._serve()
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            if not self._told:
                _log.error("no metrics, trying again", error=str(error))
            self._told = True
            return
        if self._told:
            _log.info("metrics served", address=str(self._server.address))

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.close()
