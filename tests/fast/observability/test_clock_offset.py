from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.observability.trace import RoundTrip, estimate_offset

MILLISECONDS = st.integers(min_value=0, max_value=100_000_000)


def round_trip(ahead_ns: int, sent_ns: int, there_ns: int, back_ns: int) -> RoundTrip:
    return RoundTrip(
        sent_ns=sent_ns,
        there_ns=sent_ns + there_ns + ahead_ns,
        received_ns=sent_ns + there_ns + back_ns,
    )


@given(
    st.integers(min_value=-(10**15), max_value=10**15),
    st.lists(st.tuples(MILLISECONDS, MILLISECONDS), min_size=1),
)
def test_the_offset_is_off_by_at_most_half_the_shortest_round_trip(ahead_ns, ways):
    trips = [round_trip(ahead_ns, 1000 * n, *way) for n, way in enumerate(ways)]
    offset = estimate_offset(trips)
    assert abs(offset.ahead_ns - ahead_ns) <= offset.error_ns
    assert offset.error_ns == -(-min(map(sum, ways)) // 2)


def test_a_round_trip_during_which_our_clock_was_set_back_is_not_used():
    assert estimate_offset([RoundTrip(sent_ns=10, there_ns=5, received_ns=9)]) is None
    assert estimate_offset([]) is None
