"""The end that a signal asks for: seen by whoever waits, at whatever moment the signal comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from qgpu.linux.shutdown import Shutdown

#: A signal every 100 µs, so that they come in any moment of waiting.
OFTEN = """
import signal
from qgpu.linux.shutdown import Shutdown
ending = Shutdown(signal.SIGALRM)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for _ in range(50_000):
    ending.wait(0)
signal.setitimer(signal.ITIMER_REAL, 0)
print(ending.wait())
"""

#: A signal that another thread takes, while the main thread, which runs handlers, waits without end.
ELSEWHERE = """
import os, signal, threading, time
from qgpu.linux.shutdown import Shutdown
ending = Shutdown(signal.SIGTERM)
def kill():
    main = f"/proc/self/task/{os.getpid()}/stat"
    while open(main).read().split()[2] != "S" or not waiting:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
waiting = []
threading.Thread(target=kill).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
waiting.append(True)
print(ending.wait())
"""


def test_a_signal_ends_waiting() -> None:
    ending = Shutdown(signal.SIGUSR1)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()

    assert not ending.wait(0)
    assert ending.wait(30)
    assert ending.wait()


def test_a_signal_may_come_at_any_moment_of_waiting() -> None:
    ended = subprocess.run([sys.executable, "-c", OFTEN], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "True\n"


def test_somebody_may_say_so() -> None:
    ending = Shutdown()
    ending.set()
    ending.set()

    assert ending.wait(0)


def test_a_signal_that_interrupts_nothing_ends_waiting() -> None:
    ended = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "True\n"
