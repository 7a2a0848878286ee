"""Live shares as a client of the daemon sees them: each pod's grant and its share of each pGPU between two readings."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from qgpu.ipc.control_socket import Client

#: What the daemon says of a pod on a pGPU beside its use.
_USAGE = (
    "below_quota",
    "below_quota_reason",
    "expected_wait_p99_ns",
    "gated",
    "gate_time_ns",
    "switches",
    "switch_time_ns",
)
#: How many of the last readings decide on a mark, and the parts of them that set a mark and that keep it.
_READINGS, _MOST, _FEW = 10, 0.6, 0.3
#: Text and the number after it; each may be empty.
_NUMBERS = re.compile(r"(\D*)(\d*)")


def read(client: Client) -> dict[str, Any]:
    """Return the daemon's status together with all pods."""
    return client.call("status") | {"pods": client.call("pod.list")["pods"]}


def shares(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each pod and pGPU with its share, 0 to 1: GPU time over the time between the two samples."""
    used = {(pod["name"], usage["gpu"]): usage for pod in before["pods"] for usage in pod["usage"]}
    rows = []
    for pod in now["pods"]:
        for grant, usage in zip(pod["grants"], pod["usage"], strict=True):
            last = used.get((pod["name"], grant["gpu"]), {"now_ns": usage["now_ns"], "used_ns": 0})
            elapsed_ns = usage["now_ns"] - last["now_ns"]
            share = max(0.0, (usage["used_ns"] - last["used_ns"]) / elapsed_ns) if elapsed_ns > 0 else 0.0
            has_quota = grant["cores"] is not None and share >= grant["cores"] / 100
            rows.append(
                {
                    "pod": pod["name"],
                    **grant,
                    "share": round(min(1.0, share), 4),
                    "held": usage["memory"],
                    "busy": usage["busy"],
                    "problem": pod["problem"],
                    "state": "waiting" if pod["waits_for"] else pod["state"],
                    "suspended_memory": pod["suspended_memory"].get(str(grant["gpu"]), 0),
                    **{key: usage[key] for key in _USAGE},
                    # the daemon judges a longer time than these two readings; a mark beside a full quota would confuse
                    "below_quota": usage["below_quota"] and not has_quota,
                }
            )
    return sorted(rows, key=lambda row: (row["gpu"], row["class"] != "online", natural(row["pod"])))


class BelowQuota:
    """Steady marks of pods below their quota. Shares near 95 % of a quota would make plain marks flicker.

    A mark appears or disappears only when most of the last readings agree. A pod that has had its whole quota, or no
    work, twice is not marked. The page does the same (qgpu/web/static/page.js).
    """

    def __init__(self) -> None:
        #: The last readings by pGPU and pod: why it was below its quota, or None; whether it had it, or no work.
        self._past: dict[tuple[int, str], deque[tuple[str | None, bool]]] = {}
        self._marked: set[tuple[int, str]] = set()

    def settle(self, rows: Iterable[dict[str, Any]]) -> None:
        """Change the marks in the rows of one more reading."""
        past, self._past = self._past, {}
        for row in rows:
            key = row["gpu"], row["pod"]
            well = not row["busy"] or row["cores"] is None or row["share"] >= row["cores"] / 100
            recent = self._past[key] = past.get(key, deque(maxlen=_READINGS))
            recent.append((str(row["below_quota_reason"]) if row["below_quota"] else None, well))
            reasons = [reason for reason, _ in recent if reason is not None]
            again = len(recent) > 1 and recent[-1][1] and recent[-2][1]
            most = _FEW if key in self._marked else _MOST
            row["below_quota"] = not again and len(reasons) > most * len(recent)
            if row["below_quota"]:
                self._marked.add(key)
                row["below_quota_reason"] = reasons[-1]
            else:
                self._marked.discard(key)
        self._marked &= self._past.keys()


def natural(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts names as people do: pod-2 before pod-10."""
    return [(text, int(number or 0)) for text, number in _NUMBERS.findall(name)]
