"""Sets by key hold what a dict of sets would, without empty ones."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.accounting.sets_by_key import SetsByKey

_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)))


@given(_STEPS)
def test_a_key_is_there_while_its_set_has_values(steps):
    found, expected = SetsByKey[int, int](), defaultdict[int, set[int]](set)
    for adds, key, value in steps:
        (found.add if adds else found.discard)(key, value)
        (expected[key].add if adds else expected[key].discard)(value)

    assert found == {key: values for key, values in expected.items() if values}
    assert [found.of(key) for key in range(5)] == [expected[key] for key in range(5)]
