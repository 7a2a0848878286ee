"""A small API server over HTTP: nodes, pods, claims and slices, with the rules that a driver meets there.

It keeps its objects when it is stopped, as etcd does. Of authorization it knows the node authorizer's rule for claims;
of validation, what ResourceSlices need. It writes quantities and taints in its own way, as the real one does.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from qgpu.k8s import quantities

_TIMEOUT_S = 240
Key = tuple[str, str, str]
_GI = 1024**3
_FIRST_VERSION = 100
_LEARNS_S = 0.3


class ApiServer:
    """The server and its objects by kind, namespace and name."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.objects: dict[Key, dict[str, Any]] = {}
        self.changed = threading.Condition()
        #: What happened: the kind of event and the object after it, by version.
        self.events: list[tuple[int, str, Key, dict[str, Any]]] = []
        self.version = _FIRST_VERSION
        #: Whether devices may be shared, and whether a node may only read claims of its pods.
        self.gate, self.node_authorizer = True, True
        #: The times of requests for claims, and a line for each refused write.
        self.claim_reads = 0
        self.invalid: list[str] = []
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()
        self.put("nodes", "", node, {"metadata": {"name": node, "uid": "node-uid"}})

    @property
    def url(self) -> str:
        """The address, which stays the same over restarts."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Serve. For a moment the node authorizer does not know yet which pods refer to which claims."""
        self._knows_at_s = time.monotonic() + (_LEARNS_S if self.version > _FIRST_VERSION else 0)
        handler = type("Handler", (_Handler,), {"api": self, "connections": set()})
        server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        server.daemon_threads = True
        self._port = server.server_address[1]
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop serving, and cut every connection."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            for connection in list(server.RequestHandlerClass.connections):  # type: ignore[attr-defined]
                connection.shutdown_socket()
        with self.changed:
            self.changed.notify_all()

    @property
    def running(self) -> bool:
        """Whether it serves."""
        return self._server is not None

    def kubeconfig(self, path: Path) -> Path:
        """Write an identity for it."""
        return identity(self.url, path)

    def put(self, kind: str, namespace: str, name: str, content: dict[str, Any]) -> dict[str, Any]:
        """Create or replace an object."""
        with self.changed:
            key = kind, namespace, name
            before = self.objects.get(key)
            self.version += 1
            metadata = {"name": name, "uid": str(uuid.uuid4())} | ({"namespace": namespace} if namespace else {})
            if before is not None:
                metadata["uid"] = before["metadata"]["uid"]
            content = content | {"metadata": metadata | content.get("metadata", {})}
            content["metadata"]["resourceVersion"] = str(self.version)
            self.objects[key] = content
            self.events.append((self.version, "ADDED" if before is None else "MODIFIED", key, content))
            self.changed.notify_all()
            return content

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object, if it exists."""
        with self.changed:
            key = kind, namespace, name
            if (gone := self.objects.pop(key, None)) is not None:
                self.version += 1
                gone = gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self.version)}}
                self.events.append((self.version, "DELETED", key, gone))
                self.changed.notify_all()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        with self.changed:
            return [each for (found, _, _), each in self.objects.items() if found == kind]

    def wait_for(self, what: Callable[[], Any], timeout_s: float = _TIMEOUT_S) -> Any:
        """Wait for a change that makes ``what`` true, and return what it returned."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not (found := what()):
                left = deadline - time.monotonic()
                assert left > 0, f"not within {timeout_s:g} s: {what}"
                self.changed.wait(left)
            return found

    def slice(self) -> dict[str, Any] | None:
        """The node's slice, if there is one."""
        found = self.of("resourceslices")
        assert len(found) <= 1
        return found[0] if found else None

    def wipe_slices(self) -> None:
        """Delete the node's slices, as a kubelet does that starts."""
        for each in self.of("resourceslices"):
            self.delete("resourceslices", "", each["metadata"]["name"])

    def refers(self, namespace: str, claim: str) -> bool:
        """Whether a pod of the node refers to a claim, as far as the authorizer knows."""
        return time.monotonic() > self._knows_at_s and any(
            pod["metadata"]["namespace"] == namespace and claim in pod["spec"]["claims"] for pod in self.of("pods")
        )

    def accepted(self, content: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a slice. Raises ValueError if it is invalid."""
        content = json.loads(json.dumps(content))
        spec = content["spec"]
        if len(content["metadata"]["name"]) > 253 or spec["nodeName"] != self.node:
            raise ValueError("name or node")
        for device in spec["devices"]:
            if len(device["name"]) > 63 or not all(c.isdigit() or c.islower() or c == "-" for c in device["name"]):
                raise ValueError(f"device name {device['name']}")
            for attribute in device["attributes"].values():
                (value,) = attribute.values()
                if len(value) > 64:
                    raise ValueError(f"attribute {value}")
            for name, capacity in device["capacity"].items():
                value, policy = quantities.parse(capacity["value"]), capacity["requestPolicy"]
                least, default, step = (
                    quantities.parse(text)
                    for text in (policy["validRange"]["min"], policy["default"], policy["validRange"]["step"])
                )
                most = quantities.parse(policy["validRange"].get("max", capacity["value"]))
                if not least <= default <= most <= value or (default - least) % step:
                    raise ValueError(f"capacity {name}: {capacity}")
                capacity["value"] = _canonical(capacity["value"])
            for taint in device.get("taints", ()):
                taint["timeAdded"] = "2026-01-01T00:00:00Z"
            if not self.gate:
                device.pop("allowMultipleAllocations", None)
                for capacity in device["capacity"].values():
                    capacity.pop("requestPolicy", None)
        return content


def identity(url: str, path: Path) -> Path:
    """Write an identity for the server at ``url``, and return its file."""
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return path


def _canonical(text: str) -> str:
    value = quantities.parse(text)
    return f"{int(value) // _GI}Gi" if value and value % _GI == 0 else text


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    api: ApiServer
    connections: set[_Handler]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.connections.add(self)

    def finish(self) -> None:
        self.connections.discard(self)
        super().finish()

    def shutdown_socket(self) -> None:
        """Cut this connection."""
        with suppress(OSError):
            self.connection.shutdown(2)

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # it was cut
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        kind, namespace, name, query = self._target()
        if query.get("watch"):
            self._watch(kind, query)
        elif name:
            found = self.api.objects.get((kind, namespace, name))
            if kind == "resourceslices" and found is None and self.api.node_authorizer:
                self._fail(403, f"no relationship found between node {self.api.node!r} and this object")
                return
            if kind == "resourceclaims":
                self.api.claim_reads += 1
                if self.api.node_authorizer and not self.api.refers(namespace, name):
                    self._fail(403, f"no relationship found between node {self.api.node!r} and this object")
                    return
            self._answer(200, found) if found is not None else self._fail(404, f"{kind} {name!r} not found")
        else:
            self._answer(200, {"metadata": {"resourceVersion": str(self.api.version)}, "items": self.api.of(kind)})

    def do_POST(self) -> None:
        self._write(replace=False)

    def do_PUT(self) -> None:
        self._write(replace=True)

    def do_DELETE(self) -> None:
        kind, namespace, name, _ = self._target()
        if (kind, namespace, name) in self.api.objects:
            self.api.delete(kind, namespace, name)
            self._answer(200, {"kind": "Status"})
        else:
            self._fail(404, "not found")

    def _write(self, replace: bool) -> None:
        kind, namespace, name, query = self._target()
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = content["metadata"]["name"]
        with self.api.changed:
            before = self.api.objects.get((kind, namespace, name))
            if (before is not None) != replace:
                self._fail(404 if replace else 409, f"{kind} {name!r}")
                return
            if before is not None and content["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]:
                self._fail(409, "the object has been modified")
                return
            try:
                kept = self.api.accepted(content)
            except (ValueError, KeyError) as error:
                self.api.invalid.append(repr(error))
                self._fail(422, f"invalid: {error!r}")
                return
            if "dryRun" not in query:
                kept = self.api.put(kind, namespace, name, kept)
        self._answer(200, kept)

    def _watch(self, kind: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        api = self.api
        with api.changed:
            since = int(query.get("resourceVersion") or 0)
            if not since:
                since = api.version
                first = [("ADDED", each) for each in api.of(kind)]
            else:
                first = []
        for event in first:
            self._event(*event)
        server = api._server
        while api._server is server:
            with api.changed:
                news = [each for each in api.events if each[0] > since and each[2][0] == kind]
                if not news:
                    api.changed.wait(1)
                    continue
            for version, event, _, content in news:
                self._event(event, content)
                since = version
        self.close_connection = True

    def _event(self, event: str, content: dict[str, Any]) -> None:
        line = json.dumps({"type": event, "object": content}).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _target(self) -> tuple[str, str, str, dict[str, str]]:
        """Return kind, namespace, name and query of a request."""
        url = urlsplit(self.path)
        parts = [part for part in url.path.split("/") if part]
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        return parts[0], namespace, parts[1] if len(parts) > 1 else "", query

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, message: str) -> None:
        if self.command in ("POST", "PUT"):
            self.close_connection = True
        self._answer(status, {"kind": "Status", "status": "Failure", "message": message, "code": status})
