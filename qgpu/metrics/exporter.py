"""The metrics endpoint: ``/metrics`` at the configured address. Scrapes in quick succession get the same page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain

from qgpu.errors import QgpuError
from qgpu.ipc.http_server import Address, HttpServer, Request, Response
from qgpu.metrics import hami, native
from qgpu.metrics.text import CONTENT_TYPE, render
from qgpu.metrics.view import View

#: The most connections at once: enough for two Prometheus servers and a person.
MAX_CLIENTS = 8
#: The shortest time between two renderings. Each takes time from the loops, and anyone on the network may scrape.
_EVERY_S = 0.2


def page(view: View, *, with_hami: bool) -> bytes:
    """Return the body of the answer to a scrape."""
    return render(chain(native.families(view), hami.families(view) if with_hami else ()))


class CachedPage:
    """Caches the answer to scrapes: requests during a rendering and shortly after it share its result."""

    def __init__(self, write: Callable[[], bytes]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._latest = Response()

    def latest(self) -> Response:
        """Return the answer, rendered again if the cached one is too old."""
        with self._lock:
            if time.monotonic() >= self._due_s:
                try:
                    self._latest = Response(self._write(), CONTENT_TYPE)
                except QgpuError as error:  # the plane is gone for the moment; a later scrape works again
                    self._latest = Response(f"{error}\n".encode(), status=503)
                self._due_s = time.monotonic() + _EVERY_S
            return self._latest


def serve(address: Address, look: Callable[[], View], *, with_hami: bool) -> HttpServer:
    """Serve metrics until the server is closed. Raises ConfigError if it cannot listen."""
    written = CachedPage(lambda: page(look(), with_hami=with_hami))

    def answer(request: Request) -> Response:
        if request.path != "/metrics" or request.method != "GET":
            return Response(b"metrics are at /metrics\n", status=404)
        return written.latest()

    return HttpServer(address, answer, MAX_CLIENTS)
