"""The running pods as others see them: Debian's Prometheus, and the local page in a headless Chromium."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import browse

METRICS, PROMETHEUS = "127.0.0.1:9835", "127.0.0.1:9090"
CONFIG = Path("/etc/qgpu/qgpud.toml")
_PATIENCE_S = 300
_ROWS = "[...document.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.innerText))"
_BARS = "[...document.querySelectorAll('.got')].map(bar => bar.getBoundingClientRect().width)"
_BUTTONS = "[...document.querySelectorAll('.policies button')]"


def scraped(expressions: Sequence[str], tell: Callable[..., None], figures: dict[str, Any]) -> None:
    """Have the daemon tell Prometheus, and Prometheus tell us; ``expressions`` are the documents'."""
    CONFIG.write_text(CONFIG.read_text() + f'\n[metrics]\nlisten = "{METRICS}"\n')
    subprocess.run(["systemctl", "restart", "qgpud"], check=True)
    home = Path("/run/prometheus")
    home.mkdir()
    scrape = {"job_name": "qgpu", "scrape_interval": "1s", "static_configs": [{"targets": [METRICS]}]}
    (home / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    command = ["prometheus", f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data"]
    with subprocess.Popen([*command, f"--web.listen-address={PROMETHEUS}"], stderr=subprocess.DEVNULL) as prometheus:
        try:
            end = time.monotonic() + _PATIENCE_S
            while _query("count_over_time(qgpu_pod_gpu_seconds_total[1m])").get("web", 0) < 12:
                if time.monotonic() > end:
                    raise OSError("Prometheus has no samples")
                time.sleep(1)
            rates = _query("rate(qgpu_pod_gpu_seconds_total[1m])")
            figures["scrape_ms_in_vm"] = round(1000 * _query("scrape_duration_seconds")[""], 1)
            empty = [expression for expression in expressions if not _query(expression)]
        finally:
            prometheus.terminate()
    subprocess.run(["rm", "-rf", str(home)], check=True)
    figures["ratio_by_prometheus"] = got = round(rates["web"] / rates["job"], 3)
    tell("Prometheus sees 2:1", abs(got / 2 - 1) < 0.1, got)
    tell("the documents' queries have answers", not empty, empty)


def _query(expression: str) -> dict[str, float]:
    """Ask Prometheus; the values by pod."""
    address = f"http://{PROMETHEUS}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return {}
    return {each["metric"].get("pod", ""): float(each["value"][1]) for each in found}


def driven(policy: Callable[[], str], tell: Callable[..., None], figures: dict[str, Any]) -> None:
    """Open the page in Chromium without and with its token, read the pods' shares, switch the policy by a click."""
    profile, log = Path("/run/chromium"), Path("/run/chromium.log")
    page = subprocess.Popen(["qgpuctl", "--timeout", "60", "web", "--allow-changes"], stdout=subprocess.PIPE, text=True)
    assert page.stdout is not None
    url = page.stdout.readline().strip()
    started = time.monotonic()
    browser = browse.Browser(profile, log=log)
    try:
        browser.attach(_PATIENCE_S)
        browser.open(url.partition("#")[0], _PATIENCE_S)
        _until(browser, f"{_BUTTONS}.length")
        figures["page_s"] = round(time.monotonic() - started, 1)
        tell("without the token no button works", browser.ask(f"{_BUTTONS}.every(each => each.disabled)", _PATIENCE_S))
        tell("nor does a request", _refused(url.partition("#")[0]))

        browser.open("about:blank", _PATIENCE_S)
        browser.open(url, _PATIENCE_S)
        _until(browser, "document.querySelectorAll('tbody tr').length == 2")
        tell("the page is live", browser.ask("document.getElementById('live').textContent", _PATIENCE_S) == "live")
        rows = {row[0].split()[0]: row for row in browser.ask(_ROWS, _PATIENCE_S)}
        tell("the page shows both pods", {"web", "job"} == set(rows) and "of 60 %" in rows["web"][2], rows)
        seen = _seen(browser)
        figures["ratio_on_the_page"] = seen[-1]
        tell("the page shows 2:1", abs(seen[-1] / 2 - 1) < 0.15, seen)

        browser.ask(f"{_BUTTONS}.find(each => each.textContent == 'best-effort').click()", _PATIENCE_S)
        browser.ask("document.querySelector('#ask [value=yes]').click()", _PATIENCE_S)
        _until(browser, "document.querySelector('.policies [aria-pressed=true]')?.textContent == 'best-effort'")
        tell("a click switches the policy", policy() == "best-effort")
        tell("the token is out of the address bar", "token" not in browser.ask("location.href", _PATIENCE_S))
    finally:
        browser.close()
        page.terminate()
        page.wait()
        subprocess.run(["rm", "-rf", str(profile), str(log)], check=True)


def _seen(browser: browse.Browser) -> list[float]:
    """Return the ratio of the bars as drawn, moment by moment, until it is as asked; a look is of a second only."""
    seen: list[float] = []
    while len(seen) < 15 and not (seen and abs(seen[-1] / 2 - 1) < 0.15):
        time.sleep(1)
        job, web = browser.ask(_BARS, _PATIENCE_S)
        seen.append(round(web / max(job, 0.1), 2))
    return seen


def _refused(address: str) -> bool:
    body = b'{"gpu": 0, "policy": "best-effort"}'
    request = urllib.request.Request(f"{address}policy", body, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        return error.code == 403
    return False


def _until(browser: browse.Browser, script: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not browser.ask(script, _PATIENCE_S):
        if time.monotonic() > end:
            raise OSError(f"did not come on the page: {script}")
        time.sleep(1)
