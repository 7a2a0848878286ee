"""The locks of claims: one change to a claim at a time, and claims do not wait for each other."""

from __future__ import annotations

import threading

from qgpu.k8s.dra_service import ClaimLocks


def test_changes_to_one_claim_wait_for_each_other() -> None:
    locks, inside = ClaimLocks(), threading.Event()

    def change() -> None:
        with locks.of("a"):
            inside.set()

    other = threading.Thread(target=change)
    with locks.of("a"):
        other.start()
        assert not inside.wait(0.05)
    other.join()
    assert inside.is_set()


def test_changes_to_many_claims_go_on_side_by_side() -> None:
    locks = ClaimLocks()
    together = threading.Barrier(200)

    def change(uid: str) -> None:
        with locks.of(uid):
            together.wait(60)

    threads = [threading.Thread(target=change, args=(f"claim-{number}",)) for number in range(200)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not together.broken
