"""Pods that attack the guardian, on the emulated driver: how long neighbours wait, and how soon a successor serves.

    python bench/escape.py                    # as root; no GPU; some five minutes
    python bench/escape.py --rounds 1 --out /tmp/r

Daemon, guardian, filters and pods are real; RM is a table in a file (tests/hostile/emulated.py). Two neighbours make
and free objects all the time. The figure is the longest time between two of their rounds, without an attack and beside
each attack. Figures from a card are copied from the results of isolation.py, compatibility.py and startup.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, RunInfo, at_most, median, write
from provenance import sources

from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.failover.state_fds import StateFds
from qgpu.guardian.rules import classes, controls
from qgpu.nvidia import abi
from tests.hostile.attacker import ATTACKS
from tests.hostile.emulated_host import EmulatedHost

_ROOT = Path(__file__).resolve().parent.parent
_QUIET_S, _AFTER_S = 5.0, 2.0
#: The numbers of pods and of descriptors that a successor takes over.
_PODS, _DESCRIPTORS = 64, 1000

_HOLDER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for _ in range(int(sys.argv[1])):
    os.open("/dev/random", os.O_RDWR)
print("there", flush=True)
sys.stdin.read()
"""
_SUCCESSOR = """
import os, sys, time
os.environ["EMULATED_RM"] = sys.argv[1]
from pathlib import Path
from tests.hostile import emulated
emulated.install()
from qgpu.guardian import server
from qgpu.linux.open_file_set import FileSets
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.accounting.object_table import ObjectTable
journal, table = Journal(int(sys.argv[2])), ObjectTable()
journal.own()
for fact in journal.read()[1]:
    table.note(fact)
began = time.monotonic()
made = server.Guardian(Path(sys.argv[4]), journal, FileSets(int(sys.argv[3])), table, {})
print(time.monotonic() - began, flush=True)
os._exit(0)
"""


def stall(directory: Path, attack: str | None) -> float:
    """Return the longest time in seconds that a neighbour takes for a round, beside one attack or beside none."""
    directory.mkdir()
    host = EmulatedHost(directory, 2)
    if not host.there:
        raise SystemExit("bench/escape.py: no cgroup2 tree can be mounted here; run as root")
    try:
        guardian, began = host.guardian(), time.monotonic()
        if attack is None:
            time.sleep(_QUIET_S)
        else:
            attacker = host.start_attacker(attack)
            host.until(lambda: host.has_attacked(attack), f"{attack} is done")
            time.sleep(_AFTER_S)
            attacker.terminate()
            attacker.wait()
        host.go_on()
        if host.guardian() != guardian:
            raise SystemExit(f"bench/escape.py: {attack}: a guardian was lost")
        return host.longest_wait(began)
    finally:
        host.close()


@contextmanager
def _holders(count: int) -> Iterator[list[int]]:
    """Start processes with many descriptors each."""
    command = [sys.executable, "-c", _HOLDER, str(_DESCRIPTORS)]
    held = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in held:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in held]
    finally:
        for process in held:
            process.kill()
            process.communicate()


def successor_start(directory: Path) -> float:
    """Return the seconds until a standby guardian serves, with processes that have many descriptors."""
    state = StateFds.new()
    with _holders(_PODS) as pids:
        _write(state, pids)
        command = [sys.executable, "-c", _SUCCESSOR, str(directory / "rm"), *map(str, state), str(directory)]
        ran = subprocess.run(
            command, pass_fds=list(state), cwd=_ROOT, capture_output=True, text=True, check=True, timeout=60
        )
    state.close()
    return float(ran.stdout)


def _write(state: StateFds, pids: list[int]) -> None:
    """Write the facts of one pod per process: clients used through every descriptor, TSGs, memory, UVM files."""
    journal = Journal(os.dup(state.journal))
    for number, pid in enumerate(pids):
        name, client = f"pod-{number}", 1000 + number
        journal.append(
            {"fact": "pod", "name": name, "grants": {"0": {"class": "offline", "cores": 1, "memory": 1 << 30}}}
        )
        journal.append({"fact": "process", "pid": pid, "pod": name})
        for fd in range(3, 3 + _DESCRIPTORS):
            journal.append({"fact": "client", "client": client, "pid": pid, "fd": fd})
        for fd in range(3, 11):
            journal.append({"fact": "uvm_file", "pid": pid, "fd": fd, "there": True})
        journal.append(object_fact(RmObject(client, 2, client, abi.NV01_DEVICE_0, 0)))
        journal.append({"fact": "confirm", "client": client, "handle": 2})
        for handle in range(10, 10 + _DESCRIPTORS):
            journal.append(object_fact(RmObject(client, handle, 2, abi.NV01_MEMORY_LOCAL_USER, 1 << 16)))
            journal.append({"fact": "confirm", "client": client, "handle": handle})
        for handle in range(5000, 5008):
            journal.append(object_fact(RmObject(client, handle, 2, abi.KEPLER_CHANNEL_GROUP_A, 1)))
            journal.append({"fact": "confirm", "client": client, "handle": handle})
    os.close(journal.fd)


def figures(found: list[dict[str | None, float]], starts: list[float]) -> list[Figure]:
    """Return the figures of all rounds."""
    longest = [max(each[attack] for attack in each if attack not in (None, "idle")) for each in found]
    rows = [
        median("neighbour_stall_s", longest, *at_most(0.5), note="longest round of a neighbour beside any attack"),
        median("neighbour_quiet_s", [each[None] for each in found], note="longest round without an attack"),
    ]
    rows += [
        median(f"neighbour_stall_{attack}_s", [each[attack] for each in found], note=(ATTACKS[attack].__doc__ or ""))
        for attack in ATTACKS
    ]
    note = f"what was in reserve, until it serves, with {_PODS} pods of {_DESCRIPTORS} descriptors and allocations each"
    rows.append(median("successor_start_s", starts, *at_most(1), note=note))
    return [
        *rows,
        Figure("allowed_controls", len(controls.ALLOWED), note="RM controls that a pod may issue"),
        Figure("allowed_classes", len(classes.ALLOWED), note="classes of objects that it may make"),
    ]


def on_a_card(results: Path) -> list[Figure]:
    """Return the figures of other scripts about attacks and programs in pods on a card."""

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((results / name).read_text())
        return found

    rows = read("isolation.json")["seccomp"]["rows"]
    faults = [row for row in rows if row["family"] == "fault"]
    pauses = [row["longest_pause_ms"] or 0 for row in faults]
    over_plain = [row["longest_pause_ms"] / row["plain_pause_ms"] for row in faults if row.get("plain_pause_ms")]
    over = [max(row["bytes_over_quota"] or 0, row["peak_over_quota"] or 0) for row in rows]
    failed = [row["path"] for row in rows if not row["passed"]]
    programs = read("compatibility.json")["figures"]
    starts = [read(f"{card}-startup.json")["figures"]["startup_ratio_alone"] for card in ("h100", "h200")]
    return [
        median("rows_failed", [len(failed)], *at_most(0), note=f"of {len(rows)} rows of isolation.json"),
        median("bytes_over_quota", [max(over)], *at_most(0), note="at any moment, of isolation.json"),
        median("longest_pause_ms", [max(pauses)], *at_most(50), note="of a neighbour, GPU faults of isolation.json"),
        median(
            "pause_over_plain",
            over_plain,
            *at_most(1.1),
            note="the same beside kernels that fault, by that without qgpu",
            pick=max,
        ),
        median("programs_broken", [programs["programs_broken"]], *at_most(0), note="of compatibility.json"),
        Figure("programs", programs["programs"], note="of compatibility.json"),
        median("startup_ratio", starts, *at_most(1.08), note="of h100- and h200-startup.json, the larger", pick=max),
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "results")
    options = parser.parse_args()
    began, found, starts = time.monotonic(), [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            attacks = (None, *ATTACKS)
            found.append({attack: stall(Path(directory) / str(attack), attack) for attack in attacks})
            print(", ".join(f"{attack}: {took:.3f} s" for attack, took in found[-1].items()), flush=True)
        with tempfile.TemporaryDirectory() as directory:
            starts.append(successor_start(Path(directory)))
            print(f"successor: {starts[-1]:.3f} s", flush=True)
    rows = figures(found, starts) + on_a_card(_ROOT / "docs" / "results")
    for row in rows:
        print(row.row())
    command = f"python bench/escape.py --rounds {options.rounds}"
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    about = RunInfo(command, "emulated", date, "emulated driver", "seccomp", time.monotonic() - began, sources())
    write(options.out, "escape", about, rows, {})


if __name__ == "__main__":
    main()
