"""Become a pod's process, as ``qgpuctl run`` does, with the test in the daemon's place, and execute a command.

Arguments: the plane, the descriptor of a socket to the test, the command.
"""

from __future__ import annotations

import os
import socket
import sys

from qgpu.ipc import wire
from qgpu.runtime import launch


def main() -> None:
    """Enter the plane, hand over what it made, and go on when the test has attached this process."""
    plane, fd, *command = sys.argv[1:]
    connection = wire.Connection(socket.socket(fileno=int(fd)))
    fds = launch.enter(plane)
    connection.send({"ready": True}, fds)
    if connection.receive() is None:
        sys.exit("not attached")
    for each in fds:
        os.close(each)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
