"""What the object table charges pods."""

from __future__ import annotations


def charged(table, pod):
    """Return what a pod is charged by device instance, in bytes, without managed memory."""
    return {instance: held for (name, instance), held in table.allocations.held.items() if name == pod and held}
