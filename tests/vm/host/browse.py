"""A headless Chromium and the little of its DevTools protocol that a page takes: open, ask, click by script.

Over the pipe that Chromium offers for it (descriptors 3 and 4, JSON, a zero byte behind each message): no driver
program and no library in between, whose own patience an emulator outlasts.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = "chromium-headless-shell"
#: One process where it can be one, nothing drawn by a GPU, nobody called; scripts interpreted, for what their compiler
#: writes the emulator would have to translate anew each time.
FLAGS = ("--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-software-rasterizer", "--disable-dev-shm-usage")
FLAGS += ("--js-flags=--jitless", "--no-first-run", "--disable-background-networking", "--disable-component-update")
FLAGS += ("--disable-extensions", "--disable-sync", "--mute-audio", "--window-size=1000,700")


class Browser:
    """One Chromium with one page. Raises OSError when it ends or does not answer in time."""

    def __init__(self, profile: Path, *flags: str, log: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', PROGRAM, *FLAGS, *flags,
                 f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
                pass_fds=(commands, answers), stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self._session = ""

    def attach(self, patience_s: float) -> None:
        """Wait until it is up, and take its page."""
        end = time.monotonic() + patience_s
        while not (pages := self._pages(end)):
            time.sleep(0.5)
        found = self.call("Target.attachToTarget", end, targetId=pages[0], flatten=True)
        self._session = str(found["sessionId"])

    def open(self, url: str, patience_s: float) -> None:
        """Go to an address, without waiting for what comes of it."""
        self.call("Page.navigate", time.monotonic() + patience_s, url=url)

    def ask(self, script: str, patience_s: float) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", time.monotonic() + patience_s, expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise OSError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def call(self, method: str, end: float, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result, by the time ``end``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise OSError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def close(self) -> None:
        """End it and all that it started."""
        os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _pages(self, end: float) -> list[str]:
        targets = self.call("Target.getTargets", end)["targetInfos"]
        return [each["targetId"] for each in targets if each["type"] == "page"]

    def _next(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise OSError(f"{what}: Chromium did not answer in time")
            more = os.read(self._read, 1 << 16)
            if not more:
                raise OSError(f"{what}: Chromium ended: {self._process.wait()}")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer
