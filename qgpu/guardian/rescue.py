"""Opens every gate with nothing but a journal and a client of RM's: while the next guardian has yet to be loaded."""

from __future__ import annotations

import structlog

from qgpu.errors import QgpuError
from qgpu.guardian.hands import Hands
from qgpu.guardian.journal import Journal
from qgpu.guardian.register import Register
from qgpu.rm.client import RmClient
from qgpu.rm.device import open_devices
from qgpu.rm.versions import find, installed

_log = structlog.get_logger("guardian")


def open_gates(journal_fd: int) -> None:
    """Open the gates of all pods in a journal; where that fails, the next guardian does."""
    try:
        register = Register()
        for fact in Journal(journal_fd).read()[1]:
            register.note(fact)
        client = RmClient()
        try:
            devices = open_devices(client)
            hands = Hands(register, find(installed()), client, devices)
            for device in devices:
                hands.open_gates(device)
        finally:
            client.close()
    except (QgpuError, OSError) as error:
        _log.warning("gates stay as they are until there is a guardian", reason=str(error))
