"""The page of ``qgpuctl top``: it fits every terminal, shows what matters, and asks before it changes anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.cli.screen import named
from qgpu.cli.styled_text import plain, shortened
from qgpu.cli.top_mode import Mode, chosen, pressed, settled
from qgpu.cli.top_page import View, page, room, table
from qgpu.live_shares import natural, shares

LONG = "llama-70b-finetune-of-somebody-with-a-long-name"


def row(pod: str, share: float, held: int, quota: int | None = None, **more: Any) -> dict[str, Any]:
    return {"gpu": 0, "pod": pod, "class": "offline", "cores": quota, "share": share, "held": held, "memory": None,
            "busy": True, "problem": "", "latency_target_ns": None, "state": "running", "suspended_memory": 0,
            "below_quota": False, "gated": None, "expected_wait_p99_ns": None} | more  # fmt: skip


def now(gpus: int = 2) -> dict[str, Any]:
    return {
        "version": "1",
        "plane": "sim",
        "policies": {"best-effort": 0, "fixed-share": 1, "burst-share": 2},
        "gpus": [
            {"index": n, "name": "H200", "policy": "burst-share", "online_policy": "best-effort", "period_ns": 10**8,
             "problem": "", "memory": 1 << 37, "utilization": 0.5} for n in range(gpus)
        ],
    }  # fmt: skip


ROWS = [row("a", 0.2, 5, 30), row("b", 0.5, 1, 20), row("c", 0.1, 9, **{"class": "online"})]
NOW = now()
WAITS = {"below_quota": True, "below_quota_reason": "waits: 70% of the time at its gate"}
USAGE = {"now_ns": 1, "used_ns": 0, "memory": 0, "busy": False, "below_quota": False, "below_quota_reason": None,
         "expected_wait_p99_ns": None, "gated": 0, "gate_time_ns": 0, "switches": 0, "switch_time_ns": 0}  # fmt: skip
ASKS = {"below_quota": True, "below_quota_reason": "asks for less: alone it would use 3% at most"}


def press(keys: list[str] | str, rows: list[dict[str, Any]] = ROWS, height: int = 10) -> tuple[Mode, str | None]:
    mode, policy = Mode(), None
    for key in keys:
        mode, policy = pressed(mode, key, NOW, chosen(mode, rows), height)
    return mode, policy


def text(mode: Mode, rows: list[dict[str, Any]], width: int = 80, height: int = 24, **more: Any) -> list[str]:
    return [plain(each) for each in page(mode, View(NOW, rows, **more), width, height)]


@pytest.mark.parametrize("state", ["waiting", "suspended"])
def test_a_pod_without_its_memory_is_off(state: str) -> None:
    shown = "\n".join(text(Mode(), [row("a", 0.0, 0, 30, state=state), row("b", 0.5, 1, 20, state="running")]))
    assert shown.count(" off ") == 1


@pytest.mark.parametrize(
    ("state", "share", "says"),
    [
        ("suspending", "leaves", "suspending, 64 GiB on the way"),
        ("suspended", "off", "suspended, 64 GiB in host memory"),
        ("resuming", "comes", "resuming, 64 GiB on the way"),
        ("waiting", "off", "waiting, 64 GiB in host memory"),
    ],
)
def test_a_pod_off_its_card_says_where_its_memory_is(state: str, share: str, says: str) -> None:
    rows = [row("a", 0.0, 0, 30, state=state, suspended_memory=64 << 30), row("b", 0.5, 1, 20, state="running")]
    mode, _ = press(["down"], rows)
    lines, before = text(mode, rows), text(mode, [row("a", 0.0, 0, 30), rows[1]])

    assert f" {share} " in next(line for line in lines if " a " in line)
    assert lines[-2].startswith(f"a: {says}; ")
    assert lines[3:5] == [before[3], before[4].replace("  0.0%", share.rjust(6))], "no column is wider for it"


def test_a_pod_that_runs_says_nothing_of_its_place() -> None:
    rows = [row("a", 0.1, 0, 30, state="running", suspended_memory=0)]

    assert text(press(["down"], rows)[0], rows)[-2].startswith("a: 0 B of")


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("", "abc"),
        ("s", "bac"),
        ("ss", "abc"),
        ("sss", "cab"),
        ("ssss", "abc"),
        ("sr", "cab"),
        ("c", "c"),
        ("cc", "ab"),
        ("\tg", ""),
        ("\tgg", "abc"),
    ],
)
def test_keys_sort_reverse_and_choose(keys: str, shown: str) -> None:
    mode, _ = press(keys)

    assert "".join(each["pod"] for each in chosen(mode, ROWS)) == shown


@pytest.mark.parametrize(
    ("keys", "gpu", "policy"),
    [
        ("1y", 0, "fixed-share"),
        ("\t1y", 1, "fixed-share"),
        ("\t\t0y", 0, "best-effort"),
        ("1", 0, None),
        ("1n", 0, None),
        ("1q", 0, None),
        ("11", 0, None),
        ("2y", 0, None),  # it is shared so already
        ("y", 0, None),
        ("7y", 0, None),
    ],
)
def test_a_policy_is_set_only_after_a_yes(keys: str, gpu: int, policy: str | None) -> None:
    mode, asked = press(keys)

    assert (mode.gpu, asked) == (gpu, policy)
    assert not mode.ended


@pytest.mark.parametrize(
    ("mode", "chosen_gpu", "message"),
    [
        (Mode(), 101, ""),
        (Mode(gpu=102), 102, ""),
        (Mode(gpu=7, asking="fixed-share"), 101, "unchanged: pGPU 7 is gone"),
    ],
)
def test_a_pgpu_that_is_gone_gives_way_to_the_first(mode: Mode, chosen_gpu: int, message: str) -> None:
    there = {"gpus": [{"index": 101}, {"index": 102}]}
    found = settled(mode, there)

    assert (found.gpu, found.message, found.asking) == (chosen_gpu, message, "")
    assert settled(mode, {"gpus": []}) == mode


@pytest.mark.parametrize(
    ("mode", "key", "gpus", "says"),
    [
        (Mode(), "7", 2, "no policy has number 7; ? lists them"),
        (Mode(gpu=9), "1", 2, "pGPU 9 is gone; choose another with tab"),
        (Mode(), "\t", 1, "there is no other pGPU than 0"),
        (Mode(), "\t", 0, "there is no other pGPU than 0"),
        (Mode(), "down", 2, "there is no pod to choose"),
    ],
)
def test_a_key_that_cannot_act_says_why(mode: Mode, key: str, gpus: int, says: str) -> None:
    after, policy = pressed(mode, key, now(gpus), [], 10)

    assert (after.message, after.asking, policy) == (says, "", None)


def test_a_question_names_what_would_change() -> None:
    mode, _ = press("\t1")

    assert text(mode, ROWS)[-2] == " pGPU 1: burst-share -> fixed-share? y: yes, any other key: no "


@pytest.mark.parametrize(
    ("keys", "pod", "first"),
    [
        (["down"], "p0", 0),
        (["down", "down"], "p1", 0),
        (["up"], "p19", 16),
        (["end"], "p19", 16),
        (["pgdn"], "p4", 1),
        (["pgdn", "pgdn", "pgup"], "p4", 4),
        (["end", "home"], "p0", 0),
        (["end", "down"], "p19", 16),
    ],
)
def test_the_cursor_moves_and_rows_follow(keys: list[str], pod: str, first: int) -> None:
    mode, _ = press(keys, [row(f"p{n}", 0.1, 0) for n in range(20)], height=4)

    assert (mode.cursor, mode.first) == ((0, pod), first)


def test_the_cursor_stays_on_its_pod_when_rows_move() -> None:
    mode, _ = press(["down", "down"])
    shown = [each for each in page(mode, View(NOW, [ROWS[1], ROWS[0], ROWS[2]]), 80, 24) if each[0][1].name == "CHOSEN"]

    assert [plain(each).split()[1] for each in shown] == ["b"]


@given(
    st.integers(1, 250),
    st.integers(1, 80),
    st.integers(0, 30),
    st.integers(1, 12),
    st.lists(st.sampled_from(["down", "end", "s", "r", "c", "?", "1", "\t", "g", " "]), max_size=6),
)
def test_a_page_fits_every_terminal(width: int, height: int, pods: int, gpus: int, keys: list[str]) -> None:
    rows = [row(f"{LONG}-{n}", n / 40, n << 33, n % 9 * 10 or None, gpu=n % gpus, **(WAITS if n % 3 else {}))
            for n in range(pods)]  # fmt: skip
    view = View(now(gpus), rows, {(each["gpu"], each["pod"]): [0.1, 0.2] for each in rows})
    mode = Mode()
    for key in keys:
        mode, _ = pressed(mode, key, view.now, chosen(mode, rows), room(view, height))
    lines = page(mode, view, width, height)

    assert len(lines) <= height
    assert all(len(plain(each)) <= width for each in lines)


@given(st.integers(24, 60), st.integers(80, 200))
def test_every_pod_can_be_reached_at_80_by_24(height: int, width: int) -> None:
    rows, seen, mode = [row(f"pod-{n}", 0.05, 0, gpu=n % 4) for n in range(20)], set(), Mode()
    view = View(now(4), rows)
    for _ in range(21):
        seen |= {name for each in page(mode, view, width, height) for name in plain(each).split() if "pod-" in name}
        mode, _ = pressed(mode, "down", view.now, rows, room(view, height))

    assert seen >= {each["pod"] for each in rows}


@pytest.mark.parametrize("height", [6, 8, 24])
def test_a_low_page_shows_the_pods_that_it_counts(height: int) -> None:
    lines = text(Mode(), ROWS[:1], 40, height)

    assert "1 pod by pod" in lines[0]
    assert any(line.split()[:1] == ["a"] or line.split()[:2] == ["0", "a"] for line in lines), lines


def test_eighty_columns_show_share_quota_and_memory() -> None:
    rows = [row(LONG, 0.318, 1 << 33, 40, memory=1 << 34, **WAITS)]
    shown = next(line for line in text(Mode(), rows) if "31.8%" in line)

    assert shown.startswith("! ")
    assert "llama" in shown
    assert "name" in shown
    assert "40 %" in shown
    assert "8 GiB/16 GiB" in shown


def test_a_pod_below_its_quota_says_why() -> None:
    rows = [row("a", 0.1, 0, 30, **WAITS), row("b", 0.1, 0, 30, **ASKS), row("c", 0.5, 0, 30)]
    lines = text(press(["down"], rows)[0], rows)
    marks = {line[6:8].strip(): line[0] for line in lines if line[2:6] == "  0 "}

    assert marks == {"a": "!", "b": "~", "c": " "}
    assert "waits: 70% of the time at its gate" in lines[-2]
    assert "1 below quota" in lines[1]


@pytest.mark.parametrize("width", [34, 40, 80])
def test_a_narrow_page_says_how_much_of_a_card_is_used(width: int) -> None:
    cards = {**NOW, "gpus": [card | {"name": "NVIDIA H200 NVL with a long name"} for card in NOW["gpus"]]}
    shown = plain(page(Mode(), View(cards, ROWS), width, 24)[1])

    assert "pGPU 0" in shown
    assert ": burst-share, 80% used" in shown


@pytest.mark.parametrize(("share_ns", "marked"), [(29, True), (30, False), (50, False)])
def test_a_pod_with_its_quota_is_not_marked(share_ns: int, marked: bool) -> None:
    def look(now_ns: int, used_ns: int) -> dict[str, Any]:
        usage = USAGE | {"gpu": 0, "now_ns": now_ns, "used_ns": used_ns, "busy": True, **WAITS}
        grant = {"gpu": 0, "class": "offline", "cores": 30}
        place = {"problem": "", "state": "running", "waits_for": "", "suspended_memory": {}}
        return {"pods": [{"name": "a", "grants": [grant], "usage": [usage], **place}]}

    (found,) = shares(look(0, 0), look(100, share_ns))

    assert found["below_quota"] is marked


def test_a_row_has_what_of_its_pgpu_lies_in_host_memory() -> None:
    here = {
        "name": "a",
        "problem": "",
        "state": "suspended",
        "waits_for": "",
        "suspended_memory": {"1": 64 << 30},
        "grants": [{"gpu": gpu, "class": "offline", "cores": None} for gpu in (0, 1)],
        "usage": [USAGE | {"gpu": gpu} for gpu in (0, 1)],
    }
    found = shares({"pods": [here]}, {"pods": [here]})

    assert [(each["state"], each["suspended_memory"]) for each in found] == [("suspended", 0), ("suspended", 64 << 30)]


def test_a_lost_daemon_is_said_and_shares_stay() -> None:
    lines = text(Mode(), ROWS, lost="qgpud: it hung up")

    assert "no answer, trying again: qgpud: it hung up" in lines[0]
    assert any("50.0%" in line for line in lines)


def test_a_history_is_drawn_from_low_to_high() -> None:
    rows = [row("a", 0.4, 0)]
    line = next(each for each in text(Mode(), rows, history={(0, "a"): [0.0, 0.2, 0.4]}) if " a " in each)

    assert "▁▅█" in line


def test_plain_text_has_all_columns() -> None:
    printed = table(View(NOW, [row(LONG, 0.5, 0, 30, gated=0.25, expected_wait_p99_ns=300_000)]), 0)

    assert all(wanted in printed for wanted in (LONG, "50.0%", "30 %", "25%", "300 µs", "GATED", "P99 +"))


@pytest.mark.parametrize("width", [20, 40, 80])
def test_plain_text_fits_a_terminal_and_has_no_history(width: int) -> None:
    printed = table(View(NOW, [row(LONG, 0.5, 0, 30), *ROWS], {(0, "a"): [0.5]}), width)

    assert max(map(len, printed.splitlines())) <= width
    assert "HISTORY" not in printed


@given(st.text("abcdef-", min_size=1, max_size=80), st.integers(3, 40))
def test_a_shortened_name_keeps_both_ends(name: str, width: int) -> None:
    short = shortened(name, width)

    assert len(short) <= width
    assert (short == name) == (len(name) <= width)
    assert short[0] == name[0]
    assert short[-1] == name[-1]


@pytest.mark.parametrize(
    ("sent", "key"),
    [("\x1b[A", "up"), ("\x1bOB", "down"), ("\x1b[6~", "pgdn"), ("\x1b[1;5C", ""), ("\x1b[24~", ""), ("q", "q")],
)  # fmt: skip
def test_escape_sequences_are_keys_or_nothing(sent: str, key: str) -> None:
    assert named(sent) == key


def test_names_sort_as_people_do() -> None:
    names = ["pod-10", "pod-2", "pod-1", "a10b2", "a10b10", "a9", "pod"]

    assert sorted(names, key=natural) == ["a9", "a10b2", "a10b10", "pod", "pod-1", "pod-2", "pod-10"]
