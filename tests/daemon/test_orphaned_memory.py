"""What ended pods leave counts within what their owners' claims hold, and no card grants more than it has."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from qgpu.daemon.orphaned_memory import OrphanedMemory
from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.errors import BackendGoneError
from qgpu.model import Grant
from qgpu.model.member_limits import MemberLimits
from qgpu.model.prepared_grant import PreparedDevice, PreparedGrant
from tests.daemon.claim_rig import RememberingHost

SIZES = st.integers(0, 100)
OWNERS = st.lists(st.tuples(SIZES, st.lists(st.tuples(SIZES, SIZES), max_size=3)), min_size=1, max_size=4)


@given(owners=OWNERS, others=SIZES)
def test_owners_and_what_is_left_never_have_more_than_is_sold(
    owners: list[tuple[int, list[tuple[int, int]]]], others: int
) -> None:
    """Of each owner: what its claim holds, and what its pods left first and now. ``others`` is left of nobody known."""
    host = RememberingHost()
    memory = left_memory(host, [held for held, _ in owners])
    for number, (_, pods) in enumerate(owners):
        for place, (first, _) in enumerate(pods):
            with memory.ending(f"p{number}-{place}", f"namespace n{number}"):
                host.kept[f"p{number}-{place}"] = {0: first}
    for number, (_, pods) in enumerate(owners):
        for place, (first, now) in enumerate(pods):
            host.kept[f"p{number}-{place}"] = {0: min(first, now)}
    host.left = {0: others}
    left = host.orphaned_memory()[0]
    given_out = sum(max(0, held - memory.of(f"namespace n{number}", 0)) for number, (held, _) in enumerate(owners))
    outside = memory.outside()[0]

    assert 0 <= outside <= left
    assert given_out + left <= sum(held for held, _ in owners) + outside


@given(held=SIZES, left=SIZES)
def test_what_an_owner_left_is_inside_of_its_claims(held: int, left: int) -> None:
    host = RememberingHost()
    memory = left_memory(host, [held])
    with memory.ending("p", "namespace n0"):
        host.kept["p"] = {0: left}

    assert memory.outside()[0] == max(0, left - held)
    assert memory.of("namespace n0", 0) == left


def test_a_claim_that_its_group_has_covers_nothing() -> None:
    host = RememberingHost()
    memory = left_memory(host, [50], group=True)
    memory.began("claim-d0")
    assert memory.held("namespace n0", 0) == 0
    with memory.ending("claim-d0", "namespace n0"):
        host.kept["claim-d0"] = {0: 20}

    assert memory.held("namespace n0", 0) == 50
    assert memory.outside() == {0: 0}


def test_while_the_plane_is_gone_memory_is_nobodys() -> None:
    host = RememberingHost()
    memory = left_memory(host, [50])

    class Gone(RememberingHost):
        def orphaned_memory(self) -> MappingProxyType[int, int]:
            raise BackendGoneError("guardian: it has died")

    memory._host = Gone()
    with memory.ending("p", "namespace n0"):
        host.kept["p"] = {0: 20}
    memory._host = host

    assert memory.outside() == {0: 20}


def left_memory(host: RememberingHost, held: Sequence[int], *, group: bool = False) -> OrphanedMemory:
    """Return what knows claims that hold so much of a card, each of another namespace."""
    prepared = PreparedGrants(None, host.pgpus(), None)
    part = MemberLimits() if group else None
    for number, size in enumerate(held):
        device = PreparedDevice("r", "", host.pgpus()[0].uuid, Grant(memory=size or None), f"d{number}")
        prepared.by_name = {
            **prepared.by_name,
            device.name: (PreparedGrant(device.name, f"n{number}", "c", (), (device,), part), device),
        }
    return OrphanedMemory(host, prepared)
