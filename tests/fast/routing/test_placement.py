"""Where a request goes, from loads and versions alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.routing.placement import sticky_or_least_loaded
from torchtitan_rl.routing.replicas import LoadIndex


def views(*loads: int | None, versions: tuple[int, ...] = ()) -> LoadIndex:
    """One replica a load; None is one that takes no requests (and looks idle)."""
    replicas = LoadIndex(len(loads))
    for i, load in enumerate(loads):
        version = versions[i] if versions else 0
        replicas.update(i, load=load or 0, version=version, is_eligible=load is not None)
    return replicas


some_views = st.lists(st.none() | st.integers(0, 100_000), min_size=1, max_size=12)


def test_a_session_leaves_an_overloaded_replica():
    assert sticky_or_least_loaded(views(0, 8193), last=1) == 0
    assert sticky_or_least_loaded(views(0, 8192), last=1) == 1
    assert sticky_or_least_loaded(views(10_000, 20_001), last=1) == 0
    assert sticky_or_least_loaded(views(10_000, 20_000), last=1) == 1


def test_a_session_leaves_a_home_that_lags_and_waits_where_all_lag():
    lagging_and_newest = views(0, 1, versions=(1, 2))
    assert sticky_or_least_loaded(lagging_and_newest, 0, 2) == 1
    assert sticky_or_least_loaded(lagging_and_newest, 0, 1) == 0
    assert sticky_or_least_loaded(lagging_and_newest, 0, 3) is None


@given(loads=some_views, last=st.none() | st.integers(0, 11))
def test_trap_11_a_replica_that_takes_no_requests_is_never_chosen(loads, last):
    last = last if last is not None and last < len(loads) else None
    index = sticky_or_least_loaded(views(*loads), last)
    if index is None:
        assert all(load is None for load in loads)
    else:
        assert loads[index] is not None


CHANGES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60
)


@given(count=st.integers(1, 13), changes=CHANGES, min_version=st.integers(0, 4))
def test_the_least_loaded_is_what_looking_at_all_of_them_finds(count, changes, min_version):
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
