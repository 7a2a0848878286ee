"""A process with the fake libcuda's side of checkpoints: one thread does the calls, each in its time, and fails some.

    python -m tests.checkpoint.fake_process [CALL=MILLISECONDS | CALL=fail | CALL=hang | CALL=exec]…

It prints a line when it can be asked, and one for each call with what it was given.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from contextlib import suppress

RUNNING, LOCKED, CHECKPOINTED = range(3)
#: What each call makes of which state.
STEPS = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}


def main() -> None:
    """Serve until killed."""
    how = dict(word.split("=") for word in sys.argv[1:])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0qgpu-fake-cuda-{os.getpid()}")
    listener.listen(64)
    print("ready", flush=True)
    state = RUNNING
    while True:
        connection, _ = listener.accept()
        data = connection.recv(1 << 16)
        call, result = data[:16].rstrip(b"\0").decode(), 0
        if call in STEPS:
            before, after = STEPS[call]
            if how.get(call) == "hang":
                time.sleep(3600)
            if how.get(call) == "exec":
                os.execlp("sleep", "sleep", "3600")
            if how.get(call) == "fail" or state != before:
                result = 600
            else:
                time.sleep(int(how.get(call, "0")) / 1000)
                state = after
            print(call, data[16:].hex(), flush=True)
        with suppress(OSError):  # the caller may have died; what it asked for is done
            connection.send(struct.pack("ii", result, state))
        connection.close()


if __name__ == "__main__":
    main()
