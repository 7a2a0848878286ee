"""The API server's answers in a process of many threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qgpu.k8s.cluster import ApiServerError, Cluster
from tests.k8s.api_server import identity
from tests.k8s.world import NODE

#: Lists in lists, far more than Python's decoders follow; an API server keeps up to 10,000 of them.
DEPTH = 5000

#: Threads that decode their first answers at the same time, as after an API server's return.
CROWD = """
import sys, threading
from lightkube.core import decoders
from qgpu.k8s.cluster import Node, ResourceClaim, ResourceSlice

sys.setswitchinterval(1e-6)
POOL = b'{"spec": {"driver": "a", "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1}, "devices": []}}'
ANSWERS = (Node, b'{"spec": {"taints": []}}'), (ResourceSlice, POOL), (ResourceClaim, b'{"spec": {"devices": {}}}')
together = threading.Barrier(9)

def decode(kind, data):
    together.wait()
    decoders.decode_object(data, kind)
    decoders.decode_list(b'{"metadata": {}, "items": [' + data + b"]}", kind)

threads = [threading.Thread(target=decode, args=answer) for answer in ANSWERS * 3]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_decode_first_answers_at_once_go_on() -> None:
    ends = [subprocess.run([sys.executable, "-c", CROWD], check=False).returncode for _ in range(5)]

    assert ends == [0] * 5


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Cluster]:
    """An API server whose claims have parameters that are nested very deep."""
    parameters = b'{"latencyTarget": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    body = b'{"spec": {"devices": {"config": [{"opaque": {"driver": "a", "parameters": ' + parameters + b"}}]}}}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield Cluster(identity(f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "kubeconfig"), NODE)
    server.shutdown()
    server.server_close()


def test_claim_nested_too_deep_is_an_error_of_one_line(nested: Cluster) -> None:
    with pytest.raises(ApiServerError, match="recursion") as found:
        nested.claim("team", "deep")

    assert "\n" not in str(found.value)
