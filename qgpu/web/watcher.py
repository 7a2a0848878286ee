"""Asks the daemon once a second on behalf of all open pages, and keeps the last minutes.

The daemon itself keeps the last hour, at a lower resolution. The watcher asks for it when a page opens, at most every
few seconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from qgpu import live_shares
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client

#: How many moments of the past a new page's timeline shows.
HISTORY = 300
_EVERY_S = 1.0
#: Seconds after which a disconnected reader is noticed while nothing else is sent.
_STILL_HERE_S = 5.0
_PAST_EVERY_S = 5.0
#: How many of the last moments a new page gets in full; of earlier moments it gets what the timeline shows.
_WHOLE = 10
_GPU_KEYS = ("index", "name", "memory", "policy", "online_policy", "period_ns", "problem", "utilization")


class Watcher:
    """One thread that asks the daemon, and any number of readers that wait for its results."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._news = threading.Condition()
        self._count = 0
        self._moments: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._stop = threading.Event()
        self._asking = threading.Lock()
        #: The last hour as JSON, and when the daemon was asked for it.
        self._past, self._past_s = b"{}", -_PAST_EVERY_S
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking, and end all readers."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        self._thread.join()

    def events(self) -> Iterator[bytes]:
        """Yield server-sent events: first the past, then each new state."""
        with self._news:
            seen, past = self._count, list(self._moments)
        yield _event("past", [*map(_slim, past[:-_WHOLE]), *past[-_WHOLE:]])
        while not self._stop.is_set():
            with self._news:
                if self._count == seen and not self._stop.is_set():
                    self._news.wait(_STILL_HERE_S)
                fresh = self._moments[-1] if self._count != seen else None
                seen = self._count
            yield _event("moment", fresh) if fresh is not None else b": still here\n\n"

    def past(self) -> bytes:
        """Return the last hour by pGPU as JSON. Raises QgpuError without a daemon."""
        with self._asking:
            if time.monotonic() - self._past_s >= _PAST_EVERY_S:
                with self._connect() as client:
                    known = [gpu["index"] for gpu in client.call("gpu.list")["gpus"]]
                    past = {index: client.call("gpu.history", gpu=index) for index in known}
                kept = {index: {key: answer[key] for key in ("step_s", "points")} for index, answer in past.items()}
                self._past, self._past_s = json.dumps(kept, separators=(",", ":")).encode(), time.monotonic()
            return self._past

    def _run(self) -> None:
        client: Client | None = None
        before: dict[str, Any] | None = None
        while not self._stop.is_set():
            try:
                client = client or self._connect()
                now = live_shares.read(client)
                before, last = now, before
                if last is None:  # shares are computed from two answers
                    self._stop.wait(_EVERY_S)
                    continue
                moment = _moment(last, now)
            except QgpuError as error:
                moment = {"at": time.time(), "problem": str(error), "gpus": [], "pods": []}
                if client is not None:
                    client.close()
                client = before = None
            with self._news:
                self._moments.append(moment)
                self._count += 1
                self._news.notify_all()
            self._stop.wait(_EVERY_S)
        if client is not None:
            client.close()


def _moment(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": round(time.time(), 3),
        "problem": "",
        "plane": now["plane"],
        "version": now["version"],
        "policies": list(now["policies"]),
        "gpus": [{key: gpu.get(key) for key in _GPU_KEYS} for gpu in now["gpus"]],
        "pods": live_shares.shares(before, now),
    }


def _slim(moment: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": moment["at"],
        "gpus": [{key: gpu[key] for key in ("index", "policy")} for gpu in moment["gpus"]],
        "pods": [{key: pod[key] for key in ("gpu", "pod", "share")} for pod in moment["pods"]],
    }


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
