from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.data.resting import shuffled


@given(size=st.integers(1, 200), key=st.text(max_size=5))
def test_an_order_has_every_position_once(size: int, key: str) -> None:
    assert sorted(shuffled(p, size, key=key) for p in range(size)) == list(range(size))


def test_another_key_gives_another_order() -> None:
    orders = {tuple(shuffled(p, 50, key=str(key)) for p in range(50)) for key in range(20)}
    assert len(orders) == 20


def test_every_row_comes_at_every_place() -> None:
    """Over many keys about equally often: 8 rows, 4000 keys, 500 each."""
    counts = [0] * 8
    for key in range(4000):
        counts[shuffled(0, 8, key=str(key))] += 1
    assert all(400 < count < 600 for count in counts)


def test_a_position_among_a_million_millions_needs_no_memory() -> None:
    size = 10**12
    images = {shuffled(p, size, key="k") for p in range(1000)}
    assert len(images) == 1000
    assert max(images) > size // 2
