"""What an operator sees first: figures of the command line and the daemon, on a simulated pGPU.

    python bench/first_contact.py                      # some minutes; writes docs/results/operator.json
    python bench/first_contact.py --only help_over_python

One function a figure; each may also return figures beside its own. Other scripts add figures to the same file.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import host_figures  # noqa: E402

from tests import documents, pasting  # noqa: E402
from tests.cli import programs  # noqa: E402
from tests.doctor import self_test_kills  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "operator.json"
_PASTES, _KILLS, _HELPS = 12, 30, 15

#: The defects of the operator trial by their numbers, and the tests that show that they are mended.
DEFECTS = {
    "D1 pasted blocks, and waiting for the socket": [
        "tests/cli/test_pasted_blocks.py",
        "tests/cli/test_bad_input.py::test_without_a_daemon_a_request_says_so_and_runs_nothing",
    ],
    "D2 self-tests change no policy": [
        "tests/doctor/test_self_test_kills.py",
        "tests/daemon/test_temporary_policies.py",
    ],
    "D3 quotas hold under Burst Share, and views say who is below": [
        "tests/sched/test_feedback.py::test_a_quota_holds_every_second_beside_a_guest",
        "tests/policies/test_properties.py::test_a_quota_is_a_floor_where_the_policy_guarantees_it",
        "tests/policies/test_registry.py::test_the_table_of_promises_says_what_the_registry_says",
        "tests/metrics/test_quota_check.py",
    ],
    "D4 top": ["tests/cli/test_top.py", "tests/cli/test_top_page.py"],
    "D5 the local page": ["tests/web"],
    "D6 malformed requests": ["tests/ipc/test_http_server.py", "tests/cli/test_bad_input.py"],
    "D7 memory limits below a context": [
        "tests/test_units.py",
        "tests/daemon/test_control_requests.py::test_a_limit_below_any_context_is_refused",
        "tests/runtime/test_requested_limits.py",
    ],
    "D8 old and new values, and the record of changes": [
        "tests/cli/test_events.py",
        "tests/daemon/test_events.py",
        "tests/daemon/test_settings_file.py",
        "tests/groups/test_groups.py::test_what_later_members_get_is_told_and_recorded",
    ],
    "D9 SIGHUP, removed directories, scenarios, pictures, names and units, help, completion, manual pages": [
        "tests/cli/test_restart.py",
        "tests/simulate",
        "tests/trace/test_report_page.py",
        "tests/cli/test_json_units.py",
        "tests/test_config.py",
        "tests/cli/test_help.py",
    ],
    "D10 packages and services": ["tests/packaging"],
    "D11 profilers and MIG": [
        "tests/guardian/proxy/test_profiling.py",
        "tests/cli/test_programs.py::test_profiling_is_allowed_shown_and_recorded",
        "tests/guardian/proxy/test_mig.py",
        "tests/cli/test_instances.py",
    ],
}

#: Commands that measure what those tests cannot check; their own figures have the outcome.
LANES = {
    "D3": ("python bench/real_programs.py",),
    "D5": ("python bench/page_widths.py",),
    "D10": ("python bench/distributions.py", "make packages-check", "make hosttest", "make distributiontest"),
    "D11": ("python bench/compatibility.py", "make gputest"),
}


def first_blocks_failed() -> dict[str, Any]:
    """Paste the README's first block and the wheel's block 12 times each; count the failures."""
    failed = 0
    for _ in range(_PASTES):
        failed += not _pasted("README.md", "export PATH=", lambda terminal, lines: _short_end(terminal, lines))
        failed += not _pasted(
            "docs/install.md",
            "python3 -m venv /opt/qgpu",
            lambda terminal, lines: pasting.status(
                terminal, [line.replace("/opt/qgpu/bin", "$PWD/.venv/bin") for line in lines[1:]]
            ),
        )
    return {"first_blocks_failed": failed, "first_blocks": 2 * _PASTES}


def _short_end(terminal: pasting.Terminal, lines: list[str]) -> None:
    if pasting.readme(terminal, lines, "kill %3 %2 %1") > 2000:
        raise pasting.NotSeenError("a short end")


def _pasted(document: str, first: str, play: Callable[[pasting.Terminal, list[str]], None]) -> bool:
    (block,) = (
        each
        for each in documents.blocks(ROOT)
        if each.document == document and each.commands and each.commands[0].startswith(first)
    )
    with tempfile.TemporaryDirectory(prefix="qgpu-paste-") as name:
        folder = Path(name)
        pasting.programs(folder / ".venv/bin")
        environment = {"PYTHONPATH": str(ROOT), "QGPU_RUNTIME_DIR": str(folder / "run")}
        terminal = pasting.Terminal(folder, programs.environment(environment))
        try:
            play(terminal, list(block.commands))
        except pasting.NotSeenError as error:
            print(error, file=sys.stderr)
            return False
        finally:
            terminal.close()
    return True


def policy_left_changed() -> dict[str, Any]:
    """Kill self-tests at 30 random moments; count settings that were changed, and tests of which anything is left."""
    dice, found = random.Random(1), []  # noqa: S311 - moments, no secrets
    with tempfile.TemporaryDirectory(prefix="qgpu-kills-") as name:
        state = Path(name) / "state"
        with programs.daemon(Path(name) / "run", "--sim-gpus", "2", "--state-dir", str(state)) as daemon:
            daemon.ctl("gpu", "policy", "set", "1", "best-effort")
            busy = daemon.start(*self_test_kills.tenant(daemon, 0))
            for number in range(_KILLS):
                signal = self_test_kills.SIGNALS[number % 3]
                found.append(self_test_kills.kill_one(daemon, state, signal, dice, number % 2))
            busy.terminate()
            busy.communicate(timeout=programs.TIMEOUT_S)
    for each in filter(None, found):
        print(each, file=sys.stderr)
    changed = sum(any("setting" in line for line in each) for each in found)
    left = sum(any("still" in line for line in each) for each in found)
    return {"policy_left_changed": changed, "self_tests_left": left, "self_test_kills": _KILLS}


def help_over_python() -> dict[str, Any]:
    """Time ``qgpuctl --help`` and a Python that does nothing, in turn."""
    times_s: dict[str, list[float]] = {"help": [], "pass": []}
    commands = {"help": ["-m", "qgpu.cli.main", "--help"], "pass": ["-c", "pass"]}
    for _ in range(_HELPS):
        for name, words in commands.items():
            started_s = time.monotonic()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            times_s[name].append(time.monotonic() - started_s)
    fastest = {name: min(found) for name, found in times_s.items()}
    ratio = statistics.median(times_s["help"]) / statistics.median(times_s["pass"])
    return {"help_over_python": round(ratio, 1), "help_fastest_s": round(fastest["help"], 3)}


def defects_open() -> dict[str, Any]:
    """Run the tests of every defect; count the defects that are back."""
    still = []
    for name, tests in DEFECTS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            still.append(name)
            print(result.stdout[-3000:], file=sys.stderr)
    return {"defects_open": len(still), "defects_checked": len(DEFECTS)}


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each for each in (first_blocks_failed, policy_left_changed, help_over_python, defects_open)
}


def main() -> None:
    """Measure and print; keep the figures unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FIGURES), help="figures to measure, with commas between")
    parser.add_argument("--dry", action="store_true", help="do not write docs/results/operator.json")
    options = parser.parse_args()
    unknown = [name for name in options.only.split(",") if name not in FIGURES]
    if unknown:
        parser.error(f"no such figure: {unknown[0]}; there are {', '.join(FIGURES)}")
    for name in options.only.split(","):
        figures = FIGURES[name]()
        print(figures, flush=True)
        if not options.dry:
            command = f"python bench/first_contact.py --only {name}"
            host_figures.keep(command, "simulated pGPUs", figures, RESULTS)


if __name__ == "__main__":
    main()
