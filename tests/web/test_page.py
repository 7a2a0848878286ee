"""The local page in a real browser, and its server against requests that no page of ours would make."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.errors import ExitCode
from qgpu.web.site import MAX_CLIENTS
from tests.browser import chromium
from tests.cli import programs
from tests.cli.programs import LOAD, TIMEOUT_S, Daemon
from tests.web.crowd import page

_JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two pods at 2:1."""
    pods = {"two": ("--cores", "60", "--", *LOAD), "one": ("--cores", "30", "--", *LOAD)}
    with programs.daemon(tmp_path_factory.mktemp("qgpu") / "run") as running, programs.pods(running, pods):
        yield running


@pytest.fixture(scope="module")
def changing(busy: Daemon) -> Iterator[tuple[str, str]]:
    """The address of a page that may change things, and its token."""
    with page(busy, "--allow-changes") as url:
        address, _, token = url.partition("#token=")
        yield address, token


@pytest.fixture(scope="module")
def showing(busy: Daemon) -> Iterator[str]:
    """The address of a page that only shows."""
    with page(busy) as url:
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


def request(address: str, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://").removesuffix("/"), timeout=TIMEOUT_S)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, response.read().decode()


def rows(browser: Any) -> dict[str, list[str]]:
    return {
        cells[0].split()[0]: cells
        for cells in (
            [c.text for c in r.find_elements("css selector", "th, td")]
            for r in browser.find_elements("css selector", "tbody tr")
        )
    }


def bar(browser: Any, pod: int) -> float:
    """The width of a pod's bar, as a part of its track, as drawn."""
    got, track = (browser.find_elements("css selector", f".{name}")[pod].size["width"] for name in ("got", "bar"))
    return float(got) / float(track)


def test_the_page_shows_who_gets_what(showing: str, browser: Any) -> None:
    browser.get(showing)
    while len(rows(browser)) < 2:
        pass  # the test's timeout is the bound
    browser.execute_async_script("setTimeout(arguments[0], 600)")  # until bars have moved to their place
    seen = rows(browser)

    assert list(seen) == ["one", "two"]
    assert seen["two"][2].endswith("of 60 %")
    assert bar(browser, 1) / bar(browser, 0) == pytest.approx(2.0, rel=0.15)
    assert "plane sim" in browser.find_element("id", "about").text
    assert browser.find_element("id", "live").text == "live"
    assert browser.get_log("browser") == [], "scripts and the content policy agree"


def test_a_page_without_the_token_cannot_switch(showing: str, browser: Any) -> None:
    browser.get(showing)
    while not browser.find_elements("css selector", ".policies button"):
        pass

    assert not any(button.is_enabled() for button in browser.find_elements("css selector", ".policies button"))
    assert "only shows" in browser.find_element("id", "mode").text
    status, text = request(showing, "POST", "/policy", '{"gpu": 0, "policy": "fixed-share"}', **_JSON)
    assert (status, "--allow-changes" in text) == (403, True)


def test_a_click_switches_the_policy(changing: tuple[str, str], busy: Daemon, browser: Any) -> None:
    browser.get(f"{changing[0]}#token={changing[1]}")
    while not browser.find_elements("css selector", ".policies button"):
        pass
    next(
        each for each in browser.find_elements("css selector", ".policies button") if each.text == "best-effort"
    ).click()
    assert busy.json("gpu", "show", "0")["gpu"]["policy"] == "burst-share", "not before the question is answered"
    assert "by best-effort instead of burst-share?" in browser.find_element("id", "question").text
    browser.find_element("css selector", "#ask [value=yes]").click()
    while busy.json("gpu", "show", "0")["gpu"]["policy"] != "best-effort":
        pass
    while browser.find_element("css selector", '.policies button[aria-pressed="true"]').text != "best-effort":
        pass

    assert changing[1] not in browser.current_url, "the token is out of the address bar"


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        ({"Authorization": "Bearer TOKEN"}, '{"gpu": 0, "policy": "burst-share"}', 200, ""),
        ({}, '{"gpu": 0, "policy": "fixed-share"}', 403, "token"),
        ({"Authorization": "Bearer wrong"}, '{"gpu": 0, "policy": "fixed-share"}', 403, "token"),
        ({"Authorization": "Bearer TOKEN", "Origin": "http://evil.example"}, "{}", 403, "another site"),
        ({"Authorization": "Bearer TOKEN", "Sec-Fetch-Site": "cross-site"}, "{}", 403, "another site"),
        ({"Authorization": "Bearer TOKEN", "Content-Type": "text/plain"}, "{}", 400, "application/json"),
        ({"Authorization": "Bearer TOKEN", "Host": "evil.example"}, "{}", 421, "not the host"),
        ({"Authorization": "Bearer TOKEN"}, '{"gpu": 0}', 400, "an object such as"),
        ({"Authorization": "Bearer TOKEN"}, "[" * 3000, 400, "an object such as"),
        ({"Authorization": "Bearer TOKEN"}, "x" * 5000, 413, "too long"),
        ({"Authorization": "Bearer TOKEN"}, '{"gpu": 0, "policy": "<b>"}', 400, "<b>"),
        ({"Authorization": "Bearer TOKEN"}, '{"gpu": 7, "policy": "fixed-share"}', 400, "pGPU 7"),
        ({"Authorization": "Bearer TOKEN"}, '{"gpu": "0", "policy": "fixed-share"}', 400, "gpu '0'"),
    ],
)
def test_only_what_the_page_itself_sends_changes_anything(
    changing: tuple[str, str], busy: Daemon, headers: dict[str, str], body: str, status: int, says: str
) -> None:
    address, token = changing
    sent = _JSON | {name: value.replace("TOKEN", token) for name, value in headers.items()}

    answer = request(address, "POST", "/policy", body, **sent)

    assert (answer[0], says in answer[1]) == (status, True), answer
    assert busy.json("gpu", "show", "0")["gpu"]["policy"] != "fixed-share"


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/", "localhost", 200),
        ("/events", "evil.example", 421),
        ("/../site.py", "localhost", 404),
        ("/x", "localhost", 404),
    ],
)
def test_files_are_served_by_name_and_only_to_our_own_name(showing: str, path: str, host: str, status: int) -> None:
    assert request(showing, "GET", path, Host=host)[0] == status


def test_watchers_are_bounded_and_the_newest_is_served(showing: str) -> None:
    where = showing.removeprefix("http://").removesuffix("/")
    host, port = where.split(":")
    watchers = []
    for _ in range(MAX_CLIENTS + 1):
        watcher = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        watcher.sendall(f"GET /events HTTP/1.0\r\nHost: {where}\r\n\r\n".encode())
        assert watcher.recv(15) == b"HTTP/1.0 200 OK"
        watchers.append(watcher)
    while watchers[0].recv(65536):
        pass  # the oldest is hung up on

    assert watchers[-1].recv(1)
    for watcher in watchers:
        watcher.close()


def test_at_a_unix_socket_only_its_owner_can_look(busy: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    process = busy.start("web", "--listen", f"unix:{path}")
    assert process.stdout is not None
    process.stdout.readline()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = client.recv(15)
    mode = path.stat().st_mode & 0o777
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)

    assert (answer, mode) == (b"HTTP/1.0 200 OK", 0o600)
    assert not path.exists()


def test_a_moment_carries_what_the_daemon_says(showing: str) -> None:
    connection = http.client.HTTPConnection(showing.removeprefix("http://").removesuffix("/"), timeout=TIMEOUT_S)
    connection.request("GET", "/events")
    stream = connection.getresponse()
    lines: list[str] = []
    while "event: moment" not in lines:
        lines.append(stream.readline().decode().strip())
    moment = json.loads(stream.readline().decode().removeprefix("data: "))
    connection.close()

    assert {pod["pod"] for pod in moment["pods"]} == {"one", "two"}
    assert all(0 <= pod["gated"] <= 1 for pod in moment["pods"])
    assert 0 <= moment["gpus"][0]["utilization"] <= 1
    assert moment["gpus"][0]["policy"] in ("burst-share", "best-effort")


def test_the_hour_is_the_daemons(showing: str) -> None:
    while not (points := json.loads(request(showing, "GET", "/history")[1])["0"]["points"]):
        pass  # the first point is complete after a quarter of a minute

    assert points[-1]["shares"]["two"] > points[-1]["shares"]["one"] > 0


def test_the_page_tells_when_the_daemon_is_gone_and_back(tmp_path: Path, browser: Any) -> None:
    first = Daemon(tmp_path, "--plane", "sim")
    with page(first) as url:
        browser.get(url)
        while browser.find_element("id", "live").text != "live":
            pass
        first.stop()
        while browser.find_element("id", "live").text != "no daemon":
            pass
        said = browser.find_element("id", "problem").text
        while request(url, "GET", "/history")[0] != 503:
            pass  # what was just asked is kept for some seconds
        with programs.daemon(tmp_path):
            while browser.find_element("id", "live").text != "live":
                pass

    assert "; start it: " in said or "hung up" in said or "connection lost" in said


@pytest.mark.parametrize(
    ("listen", "says"),
    [("0.0.0.0:9836", "for this host"), ("9836", "an IP address or localhost"), ("TAKEN", "in use")],
)
def test_a_wrong_address_is_one_clear_line(showing: str, busy: Daemon, listen: str, says: str) -> None:
    address = listen.replace("TAKEN", showing.removeprefix("http://").removesuffix("/"))
    result: subprocess.CompletedProcess[str] = busy.ctl("web", "--listen", address)

    assert (result.returncode, len(result.stderr.splitlines())) == (ExitCode.USAGE, 1)
    assert says in result.stderr


def test_without_a_daemon_there_is_no_page(tmp_path: Path) -> None:
    assert programs.qgpuctl(tmp_path, "--timeout", "0.3", "web").returncode == ExitCode.DAEMON_UNREACHABLE
