"""``qgpuctl trace`` end to end: real programs on the simulator, read by Perfetto's own schema and processor."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.daemon.trace_recordings import MAX_TRACES
from qgpu.errors import ExitCode, RefusedError
from qgpu.ipc.control_socket import Client
from qgpu.trace.perfetto import encode
from qgpu.trace.recording import GpuTrack, Recording
from tests.browser import chromium
from tests.cli import programs
from tests.cli.programs import LOAD, TIMEOUT_S, Daemon
from tests.trace import processor

_PODS = {
    "two": ("--cores", "60", "--", *LOAD),
    "one": ("--cores", "30", "--", *LOAD),
    "chat": ("--class", "online", "--", *LOAD, "--kernel", "100us", "--period", "10ms"),
}
_PER_POD = "select s.name as pod, count(*) as runs, sum(s.dur) as ns from slice s join track t on s.track_id = t.id"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two offline pods and an online one at work."""
    with programs.daemon(tmp_path_factory.mktemp("qgpu") / "run") as running, programs.pods(running, _PODS):
        yield running


@pytest.fixture(scope="module")
def recorded(busy: Daemon, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two seconds of them, as the command tells it and as the file."""
    file = tmp_path_factory.mktemp("trace") / "two-seconds.pftrace"
    return busy.json("trace", "--seconds", "2", "--out", str(file)), file


def test_runs_of_each_pod_add_up_to_the_ledger(recorded: tuple[dict[str, Any], Path]) -> None:
    summary, _ = recorded

    assert {pod["pod"] for pod in summary["pods"]} == {"two", "one", "chat"}
    assert all(pod["ledger_ns"] > 0 and pod["runs"] > 1 for pod in summary["pods"])
    assert summary["error"] < 0.001
    assert (summary["dropped"], summary["lost"], summary["gaps"]) == (0, 0, 0)


def test_the_file_is_a_trace_by_perfettos_schema(recorded: tuple[dict[str, Any], Path]) -> None:
    pytest.importorskip("perfetto", reason="needs perfetto: pip install 'qgpu[dev]'")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    data = recorded[1].read_bytes()
    trace = Trace.FromString(data)
    trace.DiscardUnknownFields()

    names = {packet.track_descriptor.name for packet in trace.packet if packet.HasField("track_descriptor")}
    assert {"pGPU 0 Simulated H200", "two (offline, 60 %)", "one (offline, 30 %)", "chat (online)"} < names
    assert {"plans", "gate", "wake-ups", "share"} < names
    assert trace.ByteSize() == len(data), "every field is one that the schema knows"
    kinds = [packet.track_event.type for packet in trace.packet if packet.HasField("track_event")]
    assert kinds.count(TrackEvent.TYPE_SLICE_BEGIN) == kinds.count(TrackEvent.TYPE_SLICE_END)


def test_perfettos_processor_finds_the_same_totals(recorded: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    summary, file = recorded
    totals, errors, online = processor.ask(
        file.read_bytes(),
        [
            f"{_PER_POD} where t.name not in ('gate', 'plans', 'wake-ups') group by 1",
            "select name, value from stats where value > 0 and severity != 'info'",
            "select count(*) as n from slice s join track t on s.track_id = t.id where t.name = 'wake-ups'",
        ],
        tmp_path,
    )

    assert errors == []
    assert online[0]["n"] > 0
    assert {row["pod"]: (row["runs"], row["ns"]) for row in totals} == {
        pod["pod"]: (pod["runs"], pod["traced_ns"]) for pod in summary["pods"]
    }


def test_perfettos_processor_reads_a_real_cards_trace(tmp_path: Path) -> None:
    file = Path(__file__).parent.parent.parent / "docs" / "results" / "h200-trace.pftrace"
    totals, errors = processor.ask(
        file.read_bytes(),
        [
            f"{_PER_POD} where t.name not in ('gate', 'plans', 'wake-ups') group by 1",
            "select name, value from stats where value > 0 and severity != 'info'",
        ],
        tmp_path,
    )

    assert errors == []
    # what the ledger counted over the same samples on that card
    assert {row["pod"]: (row["runs"], row["ns"]) for row in totals} == {
        "two": (359, 3_273_210_112),
        "one": (188, 1_637_773_664),
        "chat": (508, 83_123_136),
    }


def test_a_trace_shows_when_a_pod_was_suspended(tmp_path: Path) -> None:
    track = GpuTrack(0, "Simulated H200")

    def until(state: str) -> None:
        """Record until three ticks in a row have told a state of the pod."""
        told = 0
        while told < 3:
            for tick in client.call("trace.read")["ticks"]:
                track.add(tick)
                told = told + 1 if [pod["state"] for pod in tick["pods"]] == [state] else 0

    with (
        programs.daemon(tmp_path / "run") as daemon,
        programs.pods(daemon, {"one": ("--", *LOAD, "--memory", "64MiB")}),
        Client(daemon.runtime_dir) as client,
    ):
        client.call("trace.start", gpu=0)
        until("running")
        assert daemon.ctl("pod", "suspend", "one").returncode == 0
        until("suspended")
        assert daemon.ctl("pod", "resume", "one").returncode == 0
        until("running")
    states, errors = processor.ask(
        encode(Recording({0: track})),
        [
            "select s.name from slice s join track t on s.track_id = t.id where t.name = 'state' order by s.ts",
            "select name, value from stats where value > 0 and severity != 'info'",
        ],
        tmp_path,
    )
    named = [row["name"] for row in states]

    assert errors == []
    assert [name for name in named if name not in ("suspending", "resuming")] == ["running", "suspended", "running"]


def test_a_report_is_one_page_that_says_what_pods_got(busy: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    # Beside online work the two take turns of half a second: where in one a short recording ends would show in shares.
    assert busy.ctl("report", "--seconds", "3", "--out", str(file)).returncode == ExitCode.OK
    text = file.read_text()

    assert not re.findall(r"https?:|src=|@import|url\((?!#)", text), "it loads nothing"
    with chromium(tmp_path) as browser:
        browser.get(file.as_uri())
        rows = [
            [cell.text for cell in row.find_elements("css selector", "td")]
            for row in browser.find_elements("css selector", "tbody tr")
        ]
        got = {row[0]: float(row[3].rstrip("%")) for row in rows}
        assert [row[:3] for row in rows] == [
            ["chat", "online", "-"],
            ["one", "offline", "30 %"],
            ["two", "offline", "60 %"],
        ]
        assert got["two"] / got["one"] == pytest.approx(2.0, rel=0.2)
        assert len(browser.find_elements("css selector", "path.line")) == 3
        assert len(browser.find_elements("css selector", "rect")) > 20
        assert browser.get_log("browser") == []


def test_an_interrupted_trace_is_written_all_the_same(busy: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "early.pftrace"
    command = busy.start("trace", "--seconds", "600", "--out", str(file), "-o", "json")
    with Client(busy.runtime_dir) as client:
        while client.call("status")["traces"] == 0:
            pass
        command.send_signal(signal.SIGINT)
    printed, _ = command.communicate(timeout=TIMEOUT_S)

    assert command.returncode == ExitCode.OK
    assert json.loads(printed)["seconds"] < 600
    assert file.exists()


def test_trace_ends_with_its_client_and_count_is_bounded(busy: Daemon) -> None:
    clients = [Client(busy.runtime_dir) for _ in range(MAX_TRACES + 1)]
    for client in clients[:-1]:
        client.call("trace.start", gpu=None)
    with pytest.raises(RefusedError, match="already"):
        clients[-1].call("trace.start", gpu=None)
    clients.pop(0).close()
    while clients[-1].call("status")["traces"] == MAX_TRACES:
        pass

    assert clients[-1].call("trace.start", gpu=0) is not None
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--out", "/nowhere/x.pftrace", "--seconds", "0.1"), ExitCode.USAGE, "/nowhere/x.pftrace"),
        (("--out", "x.pftrace", "--gpu", "9"), ExitCode.NOT_FOUND, "pGPU 9"),
        (("--out", "x.pftrace", "--seconds", "0"), ExitCode.USAGE, "--seconds"),
        ((), ExitCode.USAGE, "--out"),
    ],
)
@pytest.mark.parametrize("command", ["trace", "report"])
def test_a_wrong_recording_is_one_clear_line(
    busy: Daemon, command: str, arguments: tuple[str, ...], code: int, says: str
) -> None:
    result: subprocess.CompletedProcess[str] = busy.ctl(command, *arguments)

    assert result.returncode == code
    assert says in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["trace", "report"])
def test_full_disk_gives_one_error_line_and_keeps_old_file(busy: Daemon, command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("before")
    program = (sys.executable, "-m", "qgpu.cli.main", "--runtime-dir", str(busy.runtime_dir))
    result = subprocess.run(
        ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *program, command, "--seconds", "0.1", "--out", str(out)],
        capture_output=True,
        text=True,
        env=programs.environment(),
        check=False,
    )

    assert (result.returncode, result.stdout) == (ExitCode.FAILED, "")
    assert result.stderr == f"qgpuctl: {out}: File too large; nothing was written there\n"
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
