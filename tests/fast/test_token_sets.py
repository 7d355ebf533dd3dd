"""Packed sets of tokens: each comes back, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.token_sets import (
    WHOLE_VOCABULARY,
    join_kept,
    kept_bits,
    kept_to_json,
    num_kept,
    pack_kept,
)
from torchtitan_rl.types import Grammar, KeptRun


@st.composite
def some_kept(draw: st.DrawFn) -> np.ndarray:
    size = draw(st.integers(1, 300))
    share = draw(st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]))
    kept = np.random.default_rng(draw(st.integers(0, 99))).random(size) < share
    kept[draw(st.integers(0, size - 1))] = True
    return kept


@given(sets=st.lists(some_kept(), min_size=1, max_size=4))
def test_a_set_comes_back_from_the_shortest_of_its_forms(sets: list[np.ndarray]) -> None:
    size = max(map(len, sets))
    sets = [np.append(kept, np.zeros(size - len(kept), dtype=np.bool_)) for kept in sets]
    packed = [pack_kept(kept) for kept in sets]
    bits = kept_bits(packed, size)
    for kept, one, row in zip(sets, packed, bits, strict=True):
        assert (np.unpackbits(row, count=size, bitorder="little") == kept).all()
        num_cut = size - int(kept.sum())
        assert num_kept(one, size) == kept.sum()
        assert len(one) <= min(4 * kept.sum(), 4 * (num_cut + 1), 4 + (size + 7) // 8)
        match kept_to_json(one):
            case None:
                assert kept.all()
            case {"all_but": cut}:
                assert cut == np.flatnonzero(~kept).tolist()
            case token_ids:
                assert token_ids == np.flatnonzero(kept).tolist()


def test_a_grammar_that_does_not_go_on_from_the_piece_before_is_not_known() -> None:
    """Its replay would start in the wrong state."""
    grammar, other = Grammar(data=b"a", stop_token_ids=()), Grammar(data=b"b", stop_token_ids=())
    first = (KeptRun(0, grammar),)
    assert join_kept(first, first, length=3) == first
    assert join_kept((), first, length=0) == first
    unknown = (KeptRun(0, grammar), KeptRun(3, None), KeptRun(5, b"\0\0\0\0"))
    second = (KeptRun(0, other), KeptRun(2, b"\0\0\0\0"))
    assert join_kept(first, second, length=3) == unknown
    assert join_kept((), first, length=3) == (KeptRun(0, WHOLE_VOCABULARY), KeptRun(3, None))
    assert kept_to_json(grammar) == "grammar"


def test_a_set_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 8"):
        kept_bits([pack_kept(np.arange(64) == 9)], 8)
