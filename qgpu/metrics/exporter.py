"""The metrics endpoint: ``/metrics`` at the configured address, written anew for every scrape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from qgpu.errors import QgpuError
from qgpu.httpd import Address, HttpServer, Request, Response
from qgpu.metrics import hami, native
from qgpu.metrics.text import CONTENT_TYPE, render
from qgpu.metrics.view import View

#: Two Prometheus servers and a person.
MAX_CLIENTS = 8


def page(view: View, *, with_hami: bool) -> bytes:
    """Return what a scrape is answered."""
    return render(chain(native.families(view), hami.families(view) if with_hami else ()))


def serve(address: Address, look: Callable[[], View], *, with_hami: bool) -> HttpServer:
    """Serve metrics until the server is closed. Raises ConfigError where it cannot listen."""

    def answer(request: Request) -> Response:
        if request.path != "/metrics" or request.method != "GET":
            return Response(b"metrics are at /metrics\n", status=404)
        try:
            return Response(page(look(), with_hami=with_hami), CONTENT_TYPE)
        except QgpuError as error:  # a plane that is gone for the moment: the scrape fails, and the next is tried
            return Response(f"{error}\n".encode(), status=503)

    return HttpServer(address, answer, MAX_CLIENTS)
