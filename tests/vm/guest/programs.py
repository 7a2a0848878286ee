"""What processes of pods are told to do, for every file of tests: ``process.run(take, size)``."""

from __future__ import annotations

import nv
import qg

MIB = 1 << 20
#: Limits leave so much for what devices take, which ``Pod.held()`` does not show.
ROOM = 8 * qg.SPACE


def program(state):
    state["p"] = nv.Program()


def take(state, size, handle=None):
    """Memory of the card; its handle, or RM's status with a minus."""
    try:
        return state["p"].memory(size, handle)
    except nv.RmError as error:
        return -error.status


def free(state, handle):
    return state["p"].free(handle)


def duplicate(state, client, handle):
    try:
        return state["p"].dup(client, handle)
    except nv.RmError as error:
        return -error.status


def status_of(state, function, *args, **options):
    try:
        getattr(state["p"], function)(*args, **options)
    except nv.RmError as error:
        return error.status
    return 0


def flood(state):
    _, (state["channel"],) = state["p"].compute()
    state["p"].submit(state["channel"], 1000)
