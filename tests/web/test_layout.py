"""The page at a glance: it fits phones and desks, keeps its order and its place, and can be read by everybody."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qgpu.ipc.control_socket import Client
from qgpu.load.workload import Workload
from tests.browser import chromium
from tests.cli import programs
from tests.web.crowd import GPUS, LONG, SCREENS, crowd, overflow_px, page, script, show, start

MANY = 20
#: Wait until the page has heard of three more moments.
_MOMENTS_LATER = """const done = arguments[0]; let count = 0; const events = new EventSource('/events');
    events.addEventListener('moment', () => { count += 1; if (count === 3) { events.close(); done(); } });"""

#: Wait until a pod has had its quota of one half for four moments, and tell whether its card is marked then.
_MARKED_WITH_QUOTA = """const [name, done] = arguments; let count = 0; const events = new EventSource('/events');
    events.addEventListener('moment', event => {
        const pod = JSON.parse(event.data).pods.find(each => each.pod === name);
        count = pod.share >= 0.5 ? count + 1 : 0;
        if (count < 4) return;
        events.close();
        setTimeout(() => done(document.querySelector('.tile').classList.contains('bad')), 300);
    });"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        driver.set_script_timeout(programs.TIMEOUT_S)
        yield driver


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page with twenty pods on four pGPUs."""
    with crowd(tmp_path_factory.mktemp("crowd") / "run", MANY) as daemon, page(daemon) as url:
        yield url


@pytest.mark.parametrize("width", SCREENS)
def test_twenty_pods_fit_every_width(many: str, browser: Any, width: int) -> None:
    show(browser, many, width, MANY)
    bottom = browser.execute_script("return document.getElementById('overview').getBoundingClientRect().bottom")

    assert overflow_px(browser) == 0
    assert len(browser.find_elements("css selector", ".tile")) == GPUS
    assert bottom <= SCREENS[width], "the overview of four pGPUs fits one screen"
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("pods", [1, 8])
def test_few_pods_fit_every_width(tmp_path: Path, browser: Any, pods: int) -> None:
    with crowd(tmp_path / "run", pods) as daemon, page(daemon) as url:
        for width in SCREENS:
            show(browser, url, width, pods)

            assert overflow_px(browser) == 0


def test_a_pgpu_without_pods_says_how_to_start_one_there(tmp_path: Path, browser: Any) -> None:
    with crowd(tmp_path / "run", 1) as daemon, page(daemon) as url:
        show(browser, url, 375, 1)
        told = [each.text for each in browser.find_elements("css selector", ".empty code")]

        assert overflow_px(browser) == 0
    # the one pod is on pGPU 1
    assert told == [
        "qgpuctl run --cores 50 -- COMMAND",
        "",
        "qgpuctl run --gpu 2 --cores 50 -- COMMAND",
        "qgpuctl run --gpu 3 --cores 50 -- COMMAND",
    ]


@pytest.mark.parametrize("width", SCREENS)
def test_no_value_sticks_out_of_its_cell(many: str, browser: Any, width: int) -> None:
    show(browser, many, width, MANY)
    browser.execute_async_script(_MOMENTS_LATER)

    assert script(browser, "tooWide") == []


def test_all_lines_of_a_long_name_begin_below_each_other(many: str, browser: Any) -> None:
    show(browser, many, 375, MANY)
    (lines,) = script(browser, "namesLines")

    assert len(set(lines)) == 1


def test_a_fact_is_not_torn_apart_at_the_end_of_a_line(many: str, browser: Any) -> None:
    show(browser, many, 375, MANY)
    facts = browser.execute_script("return document.querySelector('.facts').textContent")

    assert len(facts.split(" · ")) == 5
    assert " " not in facts.replace(" · ", "")


def test_memory_near_its_limit_stands_out_and_fits(tmp_path: Path, browser: Any) -> None:
    with crowd(tmp_path / "run", 1) as daemon, page(daemon) as url, Client(daemon.runtime_dir) as client:
        client.call("pod.create", name="full", grants={"0": {"memory": 100 << 30}})
        load = Workload(batch=0, memory=99 << 30)
        client.call("sim.start", pod="full", gpu=0, workload=load.to_dict())
        show(browser, url, 375, 2)
        while not (full := browser.find_elements("css selector", ".full")):
            pass
        lines = browser.execute_script("return document.querySelector('.tile .figures').getClientRects().length")
        heights = browser.execute_script(
            "return ['.figures', '.tile .memory'].map(each => document.querySelector(each).offsetHeight)"
        )

    assert [each.text.replace("\u202f", " ") for each in full] == ["99 GiB of 100 GiB"]
    assert lines == 1
    assert heights[0] == heights[1], "the figures take one line beside the memory"


@pytest.mark.parametrize("width", [375, 1280])
def test_a_suspended_pod_says_so_and_fits(tmp_path: Path, browser: Any, width: int) -> None:
    with programs.daemon(tmp_path / "run") as daemon, page(daemon) as url, Client(daemon.runtime_dir) as client:
        client.call("pod.create", name="train", grants={"0": {"memory": 100 << 30}})
        client.call("sim.start", pod="train", gpu=0, workload=Workload(batch=0, memory=64 << 30).to_dict())
        show(browser, url, width, 1)
        assert browser.find_element("css selector", ".note").text == ""
        assert daemon.ctl("pod", "suspend", "train").returncode == 0
        while "suspended" not in (said := browser.find_element("css selector", ".note").text):
            pass
        wider = overflow_px(browser)

    assert said.replace("\u202f", " ") == "suspended, 64 GiB in host memory"
    assert wider == 0


def test_a_pod_that_has_its_quota_again_is_not_marked(tmp_path: Path, browser: Any) -> None:
    flood, most = Workload(batch=0).to_dict(), Workload(kernel_us=8000.0, period_us=10_000.0).to_dict()
    with programs.daemon(tmp_path / "run") as daemon, page(daemon) as url, Client(daemon.runtime_dir) as client:
        client.call("pod.create", name="waits", grants={"0": {"cores": 50}})
        client.call("sim.start", pod="waits", gpu=0, workload=flood)
        with Client(daemon.runtime_dir) as first:
            first.call("pod.create", name="first", grants={"0": {"class": "online"}})
            first.call("sim.start", pod="first", gpu=0, workload=most)
            show(browser, url, 1280, 2)
            while not browser.find_elements("css selector", ".tile.bad"):
                pass
        marked = browser.execute_async_script(_MARKED_WITH_QUOTA, "waits")

    assert not marked


def test_a_command_to_type_is_not_torn_apart(tmp_path: Path, browser: Any) -> None:
    with programs.daemon(tmp_path / "run") as daemon, page(daemon) as url:
        show(browser, url, 375, 0)
        while not (found := browser.find_elements("css selector", "main code")):
            pass
        found += browser.find_elements("css selector", "footer code")
        lines = [
            browser.execute_script(
                "const range = document.createRange(); range.selectNodeContents(arguments[0]);"
                "return new Set([...range.getClientRects()].map(each => each.top)).size",
                each,
            )
            for each in found
        ]

    assert lines == [1, 1]


def test_a_page_that_only_shows_offers_no_other_policy(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    offered = [each.text for each in browser.find_elements("css selector", ".policies button") if each.is_displayed()]

    assert offered == ["burst-share"] * GPUS


def test_pods_stand_in_the_order_people_expect(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    for pods in script(browser, "names"):
        online = [name for name in pods if name != LONG and int(name[4:]) % 5 == 2]
        offline = [int(name[4:]) for name in pods if name != LONG and name not in online]

        assert pods[: len(online)] == online
        assert offline == sorted(offline)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_differ_and_contrasts_are_aa(many: str, browser: Any, theme: str) -> None:
    show(browser, many, 1280, MANY, theme)
    colours = script(browser, "swatches")
    least, text = script(browser, "leastContrast")

    assert len({colour for colour, _ in colours}) == MANY
    assert min(contrast for _, contrast in colours) >= 3
    assert least >= 4.5, text


def test_the_first_visit_follows_the_system_and_stores_nothing(many: str, browser: Any) -> None:
    papers = []
    for theme in ("light", "dark"):
        show(browser, many, 1280, MANY, theme)
        papers.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    kept = browser.execute_script("return [localStorage.length, sessionStorage.length, document.cookie]")

    assert papers[0] != papers[1]
    assert kept == [0, 0, ""]


def test_the_theme_button_goes_round_and_forgets(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    button = browser.find_element("id", "theme")
    seen = [button.get_attribute("aria-label")]
    for _ in range(3):
        button.click()
        seen.append(button.get_attribute("aria-label"))

    assert seen == ["theme: the system's", "theme: light", "theme: dark", "theme: the system's"]
    assert browser.execute_script("return localStorage.length") == 0


def test_selected_text_and_rows_survive_updates(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    browser.execute_script("""const name = document.querySelector('.name .text'); name.dataset.mark = 'mine';
        getSelection().selectAllChildren(name);""")
    selected = browser.execute_script("return getSelection().toString()")
    browser.execute_async_script(_MOMENTS_LATER)

    assert selected
    assert browser.execute_script("return getSelection().toString()") == selected
    assert browser.execute_script("return document.querySelector('.name .text').dataset.mark") == "mine"


def test_a_cursor_moves_by_arrow_keys(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    browser.execute_async_script(_MOMENTS_LATER)
    chart = browser.find_element("css selector", ".chart")
    tips = []
    for key in ("\ue012", "\ue012", "\ue00c"):  # left, left, escape
        chart.send_keys(key)
        tip = chart.find_element("css selector", ".tip")
        tips.append(tip.text if tip.is_displayed() else "")

    assert all("%" in tip for tip in tips[:2])
    assert tips[2] == ""
    assert chart.get_attribute("aria-label").startswith("Shares of pGPU 0 over 5 minutes. Now: ")


def test_every_control_is_reached_by_tab(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    reached = []
    while len(reached) < 40 and "page-end" not in reached:
        browser.switch_to.active_element.send_keys("\ue004")
        reached.append(
            browser.execute_script(
                "const a = document.activeElement; return a === document.body ? 'page-end' : a.id || a.className"
            )
        )

    assert sum(name.startswith("tile") for name in reached) == GPUS
    assert sum(name.startswith("chart") for name in reached) == GPUS
    assert {"skip", "theme"} <= set(reached)


def test_changes_are_said_politely_and_once(tmp_path: Path, browser: Any) -> None:
    with crowd(tmp_path / "run", 1) as daemon, page(daemon) as url:
        show(browser, url, 1280, 1)
        said = browser.find_element("id", "said")
        with Client(daemon.runtime_dir) as client:
            start(client, "late", 3)
            while "late came" not in said.get_attribute("textContent"):
                pass
        while "late went" not in said.get_attribute("textContent"):
            pass

    assert (said.get_attribute("role"), said.get_attribute("aria-live")) == ("status", "polite")


def test_a_removed_gpu_says_so(tmp_path: Path, browser: Any) -> None:
    with crowd(tmp_path / "run", 1) as daemon, page(daemon) as url:
        show(browser, url, 1280, 1)
        while len(browser.find_elements("css selector", ".tile")) < GPUS:
            pass
        daemon.stop()
        with programs.daemon(tmp_path / "run", "--sim-gpus", "2"):
            while len(gone := browser.find_elements("css selector", ".gpu.gone .problem")) < GPUS - 2:
                pass
            texts = [each.text for each in gone]

    assert [text[:14] for text in texts] == ["pGPU 2 is gone", "pGPU 3 is gone"]


def test_headings_and_ids_are_not_repeated(many: str, browser: Any) -> None:
    show(browser, many, 1280, MANY)
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(each => each.id)")
    levels = browser.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3')].map(each => Number(each.tagName[1]))"
    )

    assert len(ids) == len(set(ids))
    assert all(after - before <= 1 for before, after in pairwise(levels))
