"""The tokens that a truncated distribution is over, packed into bytes.

Little-endian 32-bit integers, in the shortest of these forms:

| first integer | the rest |
|---|---|
| none | the whole vocabulary is kept |
| a token id | further ids: these are kept |
| -1 | ids: all others are kept |
| -2 | one bit for each token of the vocabulary, the lowest first |
| -3 | nothing: what the completion's grammar allows (`GRAMMAR_TOKENS`) |

Shapes: V tokens of the vocabulary, B = ceil(V / 8), D sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_rl.types import KeptTokens

_INT32 = np.dtype("<i4")
_ALL_BUT, _BITS, _GRAMMAR = (np.array([tag], dtype=_INT32).tobytes() for tag in (-1, -2, -3))

WHOLE_VOCABULARY = b""
GRAMMAR_TOKENS = _GRAMMAR


def pack_kept(kept_V: npt.NDArray[np.bool_]) -> bytes:
    """The shortest form of the tokens where ``kept_V`` is True."""
    size, num_kept = len(kept_V), int(np.count_nonzero(kept_V))
    if num_kept == size:
        return WHOLE_VOCABULARY
    num_ids = min(num_kept, 1 + size - num_kept)
    if 4 + (size + 7) // 8 < 4 * num_ids:
        return _BITS + np.packbits(kept_V, bitorder="little").tobytes()
    if num_kept == num_ids:
        return np.flatnonzero(kept_V).astype(_INT32).tobytes()
    return _ALL_BUT + np.flatnonzero(~kept_V).astype(_INT32).tobytes()


def kept_bits(sets: Sequence[bytes], vocab_size: int) -> npt.NDArray[np.uint8]:
    """[D, B]: one bit for each token of the vocabulary, 1 where it is kept; the lowest bit first.

    Raises:
        ValueError: a set is `GRAMMAR_TOKENS`, or of another vocabulary.
    """
    bits_DB = np.full((len(sets), (vocab_size + 7) // 8), 255, dtype=np.uint8)
    for row_B, packed in zip(bits_DB, sets, strict=True):
        if packed == GRAMMAR_TOKENS:
            raise ValueError("the tokens that a grammar allowed have not been replayed")
        if packed[:4] == _BITS:
            row_B[:] = np.frombuffer(packed, dtype=np.uint8, offset=4)
        elif packed:
            row_B[:] = np.packbits(_kept(packed, vocab_size), bitorder="little")
    return bits_DB


def kept_to_json(packed: KeptTokens) -> Any:
    """A list of token ids, ``{"all_but": [...]}``, "grammar", or None for the whole vocabulary."""
    if not packed:
        return None
    if packed == GRAMMAR_TOKENS:
        return "grammar"
    if packed[:4] == _BITS:
        bits = np.unpackbits(np.frombuffer(packed, np.uint8, offset=4), bitorder="little")
        return np.flatnonzero(bits).tolist()
    if packed[:4] == _ALL_BUT:
        return {"all_but": np.frombuffer(packed, _INT32, offset=4).tolist()}
    return np.frombuffer(packed, _INT32).tolist()


def joined_kept(
    first: tuple[KeptTokens, ...],
    num_first: int,
    second: tuple[KeptTokens, ...],
    num_second: int,
) -> tuple[KeptTokens, ...]:
    """The sets of a completion of two pieces of ``num_first`` and ``num_second`` tokens; a piece
    without sets cut nothing."""
    if not first and not second:
        return ()
    whole = (WHOLE_VOCABULARY,)
    return (first or whole * num_first) + (second or whole * num_second)


def _kept(packed: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    is_complement = packed[:4] == _ALL_BUT
    token_ids = np.frombuffer(packed, dtype=_INT32, offset=4 if is_complement else 0)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ValueError(f"a set of kept tokens is not of this vocabulary of {vocab_size}")
    kept_V = np.full(vocab_size, is_complement, dtype=np.bool_)
    kept_V[token_ids] = not is_complement
    return kept_V
