"""What pods' processes change for others when they end."""

from __future__ import annotations

import pytest

from qgpu.guardian.accounting.rm_object import RmObject, object_fact


@pytest.mark.parametrize("channels", [False, True])
def test_end_of_a_pods_last_process_changes_what_is_scheduled(on_card, channels):
    """Without channels it changes nothing: a pod can let thousands of such processes come and go."""
    if channels:
        on_card.shared.note(object_fact(RmObject(7, 4, 2, 0xC86F)))

    assert on_card.shared.exited(on_card.process.pid) == channels
