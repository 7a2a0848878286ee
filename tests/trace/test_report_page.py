"""The report in a real browser, on a phone and on a desk: nothing is cut off, and the page does not scroll sideways."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium
from tests.cli import programs

#: Names as Kubernetes makes them.
POD = "shop.checkout-frontend-7d9f8b6c5-x2x4z.model-server"
LOAD = (sys.executable, "-m", "qgpu.load.main", "--duration", "0s", "--watch")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with programs.daemon(folder / "run") as daemon:
        pods = [daemon.start("run", "--name", name, "--cores", "20", "--", *LOAD) for name in (POD, "b")]
        for pod in pods:
            assert pod.stderr is not None
            pod.stderr.readline()  # a second of it was measured
        suspended = daemon.ctl("pod", "suspend", "b")
        assert suspended.returncode == 0, suspended.stderr
        result = daemon.ctl("report", "--seconds", "0.3", "--out", str(folder / "report.html"))
        for pod in pods:
            pod.terminate()
            pod.communicate(timeout=programs.TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.mark.parametrize("width", [375, 900, 1280])
def test_the_report_fits_the_screen(page: Path, browser: Any, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    over = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    names = browser.execute_script("return [...document.querySelectorAll('svg text')].map(each => each.textContent)")
    clipped = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].filter(each => {"
        " const name = each.getBBox(), chart = each.ownerSVGElement.viewBox.baseVal;"
        " return name.x < 0 || name.x + name.width > chart.width; }).map(each => each.textContent)"
    )

    assert over <= 0
    assert POD in names
    assert clipped == []


def test_the_report_tells_which_pod_was_suspended(page: Path, browser: Any) -> None:
    browser.get(page.as_uri())
    cells = browser.execute_script(
        "return [...document.querySelectorAll('td[data-name=suspended]')].map(each => each.textContent)"
    )
    charts = browser.execute_script("return [...document.querySelectorAll('h3')].map(each => each.textContent)")
    names = browser.execute_script(
        "const last = [...document.querySelectorAll('svg')].at(-1);"
        "return [...last.querySelectorAll('text')].map(each => each.textContent)"
    )

    assert cells == ["100.0%", "-"]  # b, then the other pod
    assert charts[-1] == "Who was suspended; hatched: on the way"
    assert "b" in names
    assert POD not in names
