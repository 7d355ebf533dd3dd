"""Packed sets of tokens: each comes back, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.token_sets import (
    GRAMMAR_TOKENS,
    WHOLE_VOCABULARY,
    kept_bits,
    kept_to_json,
    pack_kept,
)


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
        assert len(one) <= min(4 * kept.sum(), 4 * (num_cut + 1), 4 + (size + 7) // 8)
        match kept_to_json(one):
            case None:
                assert kept.all()
            case {"all_but": cut}:
                assert cut == np.flatnonzero(~kept).tolist()
            case token_ids:
                assert token_ids == np.flatnonzero(kept).tolist()


def test_what_only_a_grammar_knows_has_no_bits() -> None:
    assert kept_to_json(GRAMMAR_TOKENS) == "grammar"
    with pytest.raises(ValueError, match="replayed"):
        kept_bits([WHOLE_VOCABULARY, GRAMMAR_TOKENS], 8)


def test_a_set_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 8"):
        kept_bits([pack_kept(np.arange(64) == 9)], 8)
