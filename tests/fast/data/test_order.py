from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.data.row_dataset import shuffled


@given(size=st.integers(1, 200), key=st.text(max_size=5))
def test_an_order_has_every_position_once(size: int, key: str) -> None:
    assert sorted(shuffled(p, size, key=key) for p in range(size)) == list(range(size))


def test_a_position_among_a_million_millions_needs_no_memory() -> None:
    size = 10**12
    images = {shuffled(p, size, key="k") for p in range(1000)}
    assert len(images) == 1000
    assert max(images) > size // 2
