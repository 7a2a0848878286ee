"""The daemon's metrics endpoint. If another program has its address, the daemon starts without it and retries.

Any user may listen on a host's addresses, so an address in use must not keep the daemon from starting.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import structlog

from qgpu.errors import ConfigError
from qgpu.ipc.http_server import HttpServer

_log = structlog.get_logger("metrics")

#: How long to wait before the next try.
_RETRY_S = 2.0


class MetricsEndpoint:
    """Serves metrics as soon as its address is free."""

    def __init__(self, serve: Callable[[], HttpServer]) -> None:
        """Begin to serve. Raises ConfigError if the address is unusable for any other reason than being in use."""
        self._serve = serve
        self._server: HttpServer | None = None
        self._retry_at_s = 0.0
        self._told = False
        self.refresh()

    def refresh(self) -> None:
        """Retry if a retry is due. A daemon that has begun runs on, whatever is at the address by then."""
        if self._server is not None or time.monotonic() < self._retry_at_s:
            return
        self._retry_at_s = time.monotonic() + _RETRY_S
        try:
            self._server = self._serve()
        except ConfigError as error:
            if self._told:
                return
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            _log.error("no metrics, trying again", error=str(error))
            self._told = True
            return
        if self._told:
            _log.info("metrics served", address=str(self._server.address))

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
