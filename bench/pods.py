"""A process under measurement, in a pod or outside: finds it, waits for it and ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from progress import Progress

LOAD = (sys.executable, "-m", "qgpu.load.main")
_READY_S = 30.0


class BenchError(Exception):
    """A measurement could not be made."""


@dataclass(slots=True)
class Pod:
    """A load that was started, in a pod or plainly."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    file: Path
    log: Path

    def load_process(self) -> psutil.Process:
        """Find the load itself: the process, or the one below ``qgpuctl run``."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for found in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    if found.cmdline() == self.command:
                        return found
        raise BenchError(f"pod {self.name}: its load is not running: {tail(self.log)}")

    def wait_log(self, word: str, timeout_s: float = _READY_S) -> None:
        """Wait until the load has printed a word."""

        def printed() -> bool:
            if self.process.poll() is not None:
                raise BenchError(f"pod {self.name}: ended with code {self.process.returncode}: {tail(self.log)}")
            return word in self.log.read_text(errors="replace")

        wait_for(f"pod {self.name} to print {word!r}", printed, timeout_s)

    def finish(self, timeout_s: float = 40) -> Progress:
        """Wait until the load ends by itself, and return its result."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"pod {self.name}: still running after {timeout_s:.0f} s") from None
        if code:
            raise BenchError(f"pod {self.name}: exit code {code}: {tail(self.log)}")
        return Progress(json.loads(self.file.read_text()))

    def stop(self) -> Progress:
        """End the load and return its result."""
        self.load_process().send_signal(signal.SIGTERM)
        return self.finish()

    def end(self) -> None:
        """End it, whatever its state."""
        if self.process.poll() is None:
            with suppress(psutil.Error, BenchError):
                self.load_process().send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                with suppress(psutil.Error, BenchError):
                    self.load_process().kill()
                self.process.kill()
                self.process.wait()


def stop_all(*pods: Pod) -> list[Progress]:
    """End several loads at once and return their results."""
    for pod in pods:
        pod.load_process().send_signal(signal.SIGTERM)
    return [pod.finish() for pod in pods]


def wait_for(what: str, ready: Callable[[], bool], timeout_s: float = _READY_S) -> None:
    """Call ``ready`` every 20 ms until it is true. Raises BenchError after a timeout."""
    until = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > until:
            raise BenchError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)


def tail(log: Path, lines: int = 5) -> str:
    """Return the end of a log file in one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return " | ".join(text.strip().splitlines()[-lines:]) or "(it said nothing)"
