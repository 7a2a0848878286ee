"""Words to systemd (sd_notify), without its library; silence where nobody listens."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Send ``state``, such as ``READY=1`` or ``WATCHDOG=1``, to the service manager if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
