"""The least loaded replica, found without looking at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.routing.load import LoadIndex

CHANGES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60
)


@given(count=st.integers(1, 13), changes=CHANGES, min_version=st.integers(0, 4))
def test_it_finds_what_looking_at_all_of_them_finds(count, changes, min_version):
    index, replicas = LoadIndex(count), {}
    for number, load, version, is_eligible in changes:
        if number >= count:
            continue
        index.update(number, load=load, version=version, is_eligible=is_eligible)
        replicas[number] = (load, version, is_eligible)
        usable = [
            (load, number)
            for number, (load, version, is_eligible) in replicas.items()
            if is_eligible and version >= min_version
        ]
        assert index.least(min_version) == (min(usable)[1] if usable else None)
