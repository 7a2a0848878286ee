"""The page's server: static files, an event stream of the daemon's state, and one request that sets a policy.

Anyone who can connect may look. A change needs the token, must be JSON, and must come from the page itself: a page of
another site can neither read the token nor make a browser send such a request.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from importlib import resources
from typing import Any

from qgpu.errors import InvalidValueError, PermissionDeniedError, QgpuError
from qgpu.ipc.control_socket import Client
from qgpu.ipc.http_server import Address, HttpServer, Request, Response
from qgpu.web.watcher import Watcher

#: How many pages may be open at once; each holds a connection for its stream.
MAX_CLIENTS = 16

_SCRIPTS = ("cards.js", "format.js", "page.js", "series.js", "timeline.js")
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
} | {f"/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Site:
    """The page at one address. Raises ConfigError if it cannot listen, InvalidValueError for a public address."""

    def __init__(self, address: Address, connect: Callable[[], Client], *, changes: bool) -> None:
        if not address.private:
            raise InvalidValueError(f"{address}: the page is for this host; listen on 127.0.0.1, [::1] or unix:/path")
        self.token = secrets.token_urlsafe(24) if changes else None
        self._connect = connect
        self._watcher = Watcher(connect)
        try:
            self._server = HttpServer(address, self._answer, MAX_CLIENTS)
        except QgpuError:
            self._watcher.close()
            raise
        self.address = self._server.address

    @property
    def url(self) -> str:
        """Return the URL to open, with the token after ``#``: browsers do not send that part."""
        where = str(self.address) if self.address.path else f"http://{self.address}/"
        return where + (f"#token={self.token}" if self.token else "")

    def close(self) -> None:
        """Close the server and all its connections."""
        self._watcher.close()
        self._server.close()

    def _answer(self, request: Request) -> Response:
        if request.method == "POST":
            return self._change(request)
        if request.path == "/events":
            return Response(self._watcher.events(), "text/event-stream; charset=utf-8", headers=_HEADERS)
        if request.path == "/history":
            return self._history()
        if request.path in _FILES:
            name, kind = _FILES[request.path]
            return Response((resources.files("qgpu.web") / "static" / name).read_bytes(), kind, headers=_HEADERS)
        return Response(b"there is no such page\n", status=404)

    def _history(self) -> Response:
        try:
            return Response(self._watcher.past(), "application/json", headers=_HEADERS)
        except QgpuError as error:  # the daemon does not answer now
            return _json_response(503, str(error))

    def _change(self, request: Request) -> Response:
        """Set a policy, after checking that the request comes from the page."""
        try:
            self._check(request)
            wanted = _json(request)
            with self._connect() as client:
                client.call("gpu.set", gpu=wanted.get("gpu"), policy=wanted.get("policy"))
        except PermissionDeniedError as error:
            return _json_response(403, str(error))
        except QgpuError as error:
            return _json_response(400, str(error))
        return _json_response(200, "")

    def _check(self, request: Request) -> None:
        headers = request.headers
        if request.path != "/policy":
            raise InvalidValueError(f"{request.path}: there is no such change")
        if self.token is None:
            raise PermissionDeniedError("this page only shows; start it with: qgpuctl web --allow-changes")
        own = headers.get("sec-fetch-site", "same-origin") == "same-origin"
        if not own or headers.get("origin", f"http://{headers.get('host')}") != f"http://{headers.get('host')}":
            raise PermissionDeniedError("the request comes from another site's page")
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise PermissionDeniedError("the token is missing or wrong; open the address that qgpuctl web printed")
        if headers.get("content-type") != "application/json":
            raise InvalidValueError("a change is application/json")


def _json(request: Request) -> dict[str, Any]:
    try:
        wanted = json.loads(request.body)
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict) or set(wanted) != {"gpu", "policy"}:
        raise InvalidValueError('a change is an object such as {"gpu": 0, "policy": "burst-share"}')
    return wanted


def _json_response(status: int, problem: str) -> Response:
    return Response(json.dumps({"problem": problem}).encode(), "application/json", status)
