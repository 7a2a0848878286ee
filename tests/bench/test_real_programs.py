"""What is made of the steps of torch programs: on made-up runs of which the answer is known."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch_worker
from hypothesis import given
from hypothesis import strategies as st
from pods import BenchError, wait_for
from real_pairs import Alone, Pair, PairResult, farthest, floor, least_by_chance, row, twice
from real_programs import BEST_OF, EVEN, TWO_ONE, programs_of
from script import keep_rows
from torch_processes import SpanResult, StepStats, TorchProcesses, p99, speed, split_cpus, step_stats

MS = 1_000_000
S = 1_000 * MS


def _steady(took_ms, until_s=4.0, began_s=0.0):
    """Return steps of one length, one after the other."""
    took_ns = round(took_ms * MS)
    count = round((until_s - began_s) * S / took_ns)
    return [(round(began_s * S) + (n + 1) * took_ns, took_ns) for n in range(count)]


def _in_turns(took_ms, part, phase, until_s=5.0, period_ms=100.0):
    """Return steps of a program that has the card in the first ``part`` of every period."""
    steps, began_ms, left_ms = [], phase * period_ms, took_ms
    period = 0
    while period * period_ms < until_s * 1000:
        at_ms, turn_ms = (phase + period) * period_ms, part * period_ms
        while turn_ms >= left_ms:
            at_ms += left_ms
            turn_ms -= left_ms
            steps.append((round(at_ms * MS), round((at_ms - began_ms) * MS)))
            began_ms, left_ms = at_ms, took_ms
        left_ms -= turn_ms
        period += 1
    return steps


def _taken(*speeds, p99_ms=1.0, busy=math.nan):
    return SpanResult(tuple(StepStats(each, 1000 / each, p99_ms) for each in speeds), busy)


def _alone(**speeds):
    alone = Alone()
    for name, each in speeds.items():
        alone.add(name, _taken(each, busy=0.6))
    return alone


@given(st.floats(0.1, 400), st.floats(0.5, 1.0))
def test_a_steady_program_has_its_speed_in_any_span(took_ms, start_s):
    found = speed(_steady(took_ms), round(start_s * S), round((start_s + 1.1) * S))

    assert found == pytest.approx(1000 / took_ms, rel=1e-4)


@given(st.floats(2, 20), st.sampled_from([1 / 3, 1 / 2, 2 / 3]), st.floats(0, 0.99), st.floats(0.5, 1.5))
def test_turns_of_a_period_hardly_show_in_a_speed(took_ms, part, phase, start_s):
    steps = _in_turns(took_ms, part, phase)

    assert speed(steps, round(start_s * S), round((start_s + 3) * S)) == pytest.approx(part * 1000 / took_ms, rel=0.02)


def test_who_does_nothing_has_no_speed():
    assert speed([], 0, S) == 0
    assert speed(_steady(10, 1.0), 2 * S, 3 * S) == 0


def test_steps_count_for_latency_where_they_end():
    steps = [(90 * MS, 80 * MS), (110 * MS, 20 * MS), (150 * MS, 40 * MS), (210 * MS, 60 * MS)]
    found = step_stats(steps, 100 * MS, 200 * MS)

    assert (found.median_ms, found.p99_ms) == (30, 40)


def test_a_p99_is_what_one_in_a_hundred_exceeds():
    assert p99(range(1, 101)) == 99
    assert p99(range(1, 201)) == 198
    assert p99([7.0]) == 7.0
    assert math.isnan(p99([]))


@pytest.mark.parametrize(
    ("part", "busy", "good_for"),
    [(0.66, 0.5, 1.0), (0.33, 0.66, 0.5), (0.5, 1.0, 0.5), (0.5, math.nan, 0.5), (0.5, 0.0, 0.5)],
)
def test_a_quota_is_good_for_what_it_is_of_a_busy_card(part, busy, good_for):
    assert floor(good_for, part, busy) == pytest.approx(1)
    assert floor(good_for / 2, part, busy) == pytest.approx(0.5)


def test_the_farthest_may_lie_on_either_side():
    assert farthest([1.99, 2.03, 2.0], 2) == 2.03
    assert farthest([1.95, 2.03, 2.0], 2) == 1.95


def test_a_round_is_compared_to_plain_spans_on_both_sides():
    plain = [_taken(4.0, 4.0), _taken(6.0, 6.0), _taken(5.0, 5.0)]
    found = PairResult(twice("x"), {EVEN: plain}, {EVEN: [_taken(5.0, 5.0), _taken(5.5, 11.0)]})

    assert found.gained(EVEN, _alone(x=10.0)) == pytest.approx([1.0, 1.5])
    assert found.plain_again(_alone(x=10.0)) == pytest.approx([6 / 4.5])


def test_a_speed_is_over_the_median_of_those_alone():
    found = PairResult(twice("x"), shared={EVEN: [_taken(4.0, 8.0)]})
    alone = Alone()
    for each, busy in ((10.0, 0.5), (5.0, 0.25), (8.0, 0.75)):
        alone.add("x", _taken(each, busy=busy))

    assert found.totals(found.shared[EVEN], alone) == pytest.approx([1.5])
    assert found.floors(found.shared[EVEN], EVEN, alone) == [pytest.approx([0.5]), pytest.approx([1.0])]


@given(st.lists(st.floats(0.1, 2), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 9))
def test_the_least_by_chance_is_one_of_the_values(values, ways, rounds):
    by_chance = least_by_chance(values, ways, 2 * rounds - 1, draws=3)

    assert len(by_chance) == 3
    assert set(by_chance) <= set(values)


def test_more_ways_have_a_lesser_least_by_chance():
    values = [0.8, 0.9, 1.0, 1.1, 1.2]
    few, many = (statistics.median(least_by_chance(values, ways, 5)) for ways in (1, 18))

    assert many < few == 1.0


@given(st.sets(st.integers(0, 255), max_size=64))
def test_two_processes_get_equal_cpus_and_some_are_left(cpus):
    first, second = split_cpus(cpus)

    assert len(first) == len(second) != 1
    assert len({*first, *second}) == 2 * len(first) <= max(0, len(cpus) - 2)
    assert {*first, *second} <= cpus
    assert bool(first) == (len(cpus) >= 6)


def test_speeds_are_over_those_of_the_same_program_alone():
    found = PairResult(Pair("x", "y"), shared={TWO_ONE: [_taken(6.0, 7.0)]})
    alone = _alone(x=10.0, y=20.0)

    assert found.totals(found.shared[TWO_ONE], alone) == pytest.approx([0.95])
    assert found.ratios(TWO_ONE, alone) == pytest.approx([0.6 / 0.35])
    assert found.floors(found.shared[TWO_ONE], TWO_ONE, alone) == [pytest.approx([0.6]), pytest.approx([0.35 / 0.55])]


def test_without_quotas_each_is_meant_to_have_half():
    assert BEST_OF.parts == EVEN.parts == (0.5, 0.5)
    assert (TWO_ONE.mps, BEST_OF.mps) == ("MPS 66/33", "MPS")


def test_names_are_fit_for_figures():
    assert twice("copy-h2d").tag == "copy_h2d_x2"
    assert Pair("training-large", "decoder-eager").tag == "training_large_decoder_eager"
    assert (TWO_ONE.tag, BEST_OF.tag) == ("burst_66_33", "best_effort")


def test_a_process_loads_what_it_is_to_run_and_no_more():
    pairs = [(("a", "b"), twice("x")), (("a", "b"), Pair("y", "x")), (("o", "a"), Pair("z", "x"))]

    assert programs_of(pairs) == {"a": ["x", "y"], "b": ["x"], "o": ["z"]}


def test_a_row_has_medians_and_null_for_what_is_not_known():
    spans = [_taken(5.0, 2.0), _taken(6.0, 2.0), _taken(7.0, 2.0)]
    told = row("s", PairResult(twice("x")), "plain", spans, _alone(x=10.0))

    assert (told["steps_per_s"], told["over_alone"], told["sum_over_alone"]) == ([6.0, 2.0], [0.6, 0.2], 0.8)
    assert told["utilisation"] is None


def test_a_section_replaces_its_own_rows_only(tmp_path):
    file = tmp_path / "x-rows.json"
    keep_rows(file, "a", [{"section": "a", "n": 1}])
    keep_rows(file, "b", [{"section": "b", "n": 2}])
    keep_rows(file, "a", [{"section": "a", "n": 3}])
    keep_rows(file, "b", [])

    assert json.loads(file.read_text())["rows"] == [{"section": "b", "n": 2}, {"section": "a", "n": 3}]


class _Worker:
    """What TorchProcesses asks of a process, with one that answers at once or has ended."""

    def __init__(self, tmp_path, code=None):
        self.name, self.file, self.log = "pa", tmp_path / "1-pa.json", tmp_path / "1-pa.log"
        self.process, self.returncode = self, code
        self.log.write_text("already\nready\nout of memory\n")

    def poll(self):
        return self.returncode

    def tell(self, steps):
        line = json.dumps({"program": "x", "steps": steps})
        with self.file.with_suffix(torch_worker.CHUNKS).open("a") as file:
            file.write(line + "\n")


class _Script:
    class bench:  # noqa: N801 (as Script has it)
        simulated = True

    def say(self, text):
        pass


def _workers(worker):
    workers = TorchProcesses(_Script())
    workers._keep(worker)
    return workers


def test_a_crew_reads_each_chunk_once(tmp_path):
    worker = _Worker(tmp_path)
    workers = _workers(worker)
    workers.wait_ready()
    worker.tell([[10, 5]])
    first = workers._steps("pa", "x")
    worker.tell([[20, 5], [30, 5]])

    assert (first, workers._steps("pa", "x")) == ([(10, 5)], [(20, 5), (30, 5)])


def test_a_process_that_ends_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(BenchError, match=r"pa: ended with code 3: .*out of memory"):
        _workers(_Worker(tmp_path, 3)).take({"pa": "x"}, 0.1, 0.1)


def test_a_process_that_does_nothing_is_an_error(tmp_path):
    worker = _Worker(tmp_path)
    worker.tell([])

    with pytest.raises(BenchError, match="pa: no step of x"):
        _workers(worker).take({"pa": "x"}, 0.0, 0.05)


PROGRAMS = """
import pathlib, time
def steps(name, seconds):
    def step():
        time.sleep(seconds)
        with pathlib.Path(__file__).with_name(name).open("a") as file:
            file.write("x")
    return lambda: step
PROGRAMS = {"short": steps("short", 0.01), "service": steps("service", 0.03)}
PERIOD_MS = {"service": 20}
"""
START = "import sys; sys.path[:0] = sys.argv.pop().split(':'); import torch_worker; torch_worker.main()"


def test_a_worker_runs_what_it_is_asked_and_tells_of_each_step(tmp_path):
    (tmp_path / "torch_programs.py").write_text(PROGRAMS)
    bench = Path(torch_worker.__file__).parent
    result, log = tmp_path / "r.json", tmp_path / "log"
    arguments = ["--programs", "short,service", "--json", str(result), f"{tmp_path}:{bench}:{bench.parent}"]
    with log.open("wb") as output:
        worker = subprocess.Popen([sys.executable, "-c", START, *arguments], stdout=output, stderr=output)
    try:
        wait_for("the worker to load", lambda: "ready" in log.read_text() or worker.poll() is not None)
        for program in ("short", "service", torch_worker.REST):
            torch_worker.ask(result, program)
            if program != torch_worker.REST:  # three steps before it is ready, and some more
                wait_for(f"steps of {program}", lambda steps=tmp_path / program: steps.stat().st_size > 3 + 5)
        chunks = result.with_suffix(torch_worker.CHUNKS)
        wait_for("the worker to rest", lambda: chunks.exists() and chunks.read_text().count("\n") == 2)
        worker.terminate()
        assert worker.wait() == 0
    finally:
        worker.kill()
        worker.wait()
    told = [json.loads(line) for line in chunks.read_text().splitlines()]

    assert {each["program"]: each["steps"] for each in told} == json.loads(result.read_text())["steps"]
    assert min(took for _, took in told[0]["steps"]) >= 10 * MS
    # A request each 20 ms that takes 30 ms waits longer and longer: that counts.
    assert told[1]["steps"][3][1] > told[1]["steps"][0][1] + 20 * MS
