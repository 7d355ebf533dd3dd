"""The sets of tokens from which tokens were sampled (after truncation), and runs of tokens with
equal sets. No I/O and no state.

A set of tokens is packed into little-endian 32-bit integers, in the shortest of these forms:

| first integer | the rest |
|---|---|
| none | the whole vocabulary is kept |
| a token id | further ids: these are kept |
| -1 | ids: all others are kept |
| -2 | one bit for each token of the vocabulary, the lowest first |

Shapes: V tokens of the vocabulary, B = ceil(V / 8), D sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_rl.types import Grammar, KeptRun, KeptTokens, join_runs, spans

_INT32 = np.dtype("<i4")
_ALL_BUT, _BITS = (np.array([tag], dtype=_INT32).tobytes() for tag in (-1, -2))

WHOLE_VOCABULARY = b""


def pack_kept(kept_V: npt.NDArray[np.bool_]) -> bytes:
    """Pack the tokens where ``kept_V`` is True, in the shortest form."""
    size, num_kept = len(kept_V), int(np.count_nonzero(kept_V))
    if num_kept == size:
        return WHOLE_VOCABULARY
    num_ids = min(num_kept, 1 + size - num_kept)
    if 4 + (size + 7) // 8 < 4 * num_ids:
        return _BITS + np.packbits(kept_V, bitorder="little").tobytes()
    if num_kept == num_ids:
        return np.flatnonzero(kept_V).astype(_INT32).tobytes()
    return _ALL_BUT + np.flatnonzero(~kept_V).astype(_INT32).tobytes()


def num_kept(packed: bytes, vocab_size: int) -> int:
    if packed[:4] == _BITS:
        return int.from_bytes(packed[4:]).bit_count()
    if packed[:4] == _ALL_BUT:
        return vocab_size - (len(packed) // 4 - 1)
    return len(packed) // 4 or vocab_size


def kept_bits(sets: Sequence[bytes], vocab_size: int) -> npt.NDArray[np.uint8]:
    """Return [D, B]: one bit for each token of the vocabulary, lowest bit first; 1 means kept.
    Raises ValueError: a set contains a token id outside the vocabulary."""
    bits_DB = np.full((len(sets), (vocab_size + 7) // 8), 255, dtype=np.uint8)
    for row_B, packed in zip(bits_DB, sets, strict=True):
        if packed[:4] == _BITS:
            row_B[:] = np.frombuffer(packed, dtype=np.uint8, offset=4)
        elif packed:
            row_B[:] = np.packbits(_kept(packed, vocab_size), bitorder="little")
    return bits_DB


def kept_to_json(packed: KeptTokens) -> Any:
    """Return the kept token ids as a list, or ``{"all_but": [...]}``, "grammar", or None for the
    whole vocabulary."""
    if not packed:
        return None
    if isinstance(packed, Grammar):
        return "grammar"
    if packed[:4] == _BITS:
        bits = np.unpackbits(np.frombuffer(packed, np.uint8, offset=4), bitorder="little")
        return np.flatnonzero(bits).tolist()
    if packed[:4] == _ALL_BUT:
        return {"all_but": np.frombuffer(packed, _INT32, offset=4).tolist()}
    return np.frombuffer(packed, _INT32).tolist()


def kept_runs(sets: Iterable[KeptTokens]) -> tuple[KeptRun, ...]:
    """Convert the set of each token to runs of tokens with equal sets."""
    runs, start = [], 0
    for kept, equal in groupby(sets):
        runs.append(KeptRun(start, kept))
        start += sum(1 for _ in equal)
    return tuple(runs)


def kept_of_each(runs: Sequence[KeptRun], length: int) -> list[KeptTokens]:
    if not runs:
        return [WHOLE_VOCABULARY] * length
    return [kept for start, end, kept in spans(runs, length) for _ in range(start, end)]


def kept_after(runs: Sequence[KeptRun], start: int, *, length: int) -> tuple[KeptRun, ...]:
    return kept_runs(kept_of_each(runs, length)[start:]) if runs else ()


def join_kept(
    first: tuple[KeptRun, ...], second: tuple[KeptRun, ...], *, length: int
) -> tuple[KeptRun, ...]:
    """Join the runs of a completion's first ``length`` tokens with those of the tokens after them.
    A grammar can be replayed only from a completion's first token, so one that begins with
    ``second`` becomes None."""
    whole = (KeptRun(0, WHOLE_VOCABULARY),)
    if not length or not (first or second):
        return second
    first, second = first or whole, second or whole
    begins = second[0].kept
    if isinstance(begins, Grammar) and begins != first[-1].kept:
        second = (KeptRun(0, None), *second[1:])
    return join_runs(first, second, length=length)


def kept_error(runs: Sequence[KeptRun], length: int) -> str:
    """Return the error in the runs of ``length`` tokens; empty if they are valid."""
    starts = [run.start for run in runs]
    if runs and (starts != sorted(set(starts)) or starts[0] != 0 or starts[-1] >= length):
        return f"runs of kept tokens start at {starts}, for {length} tokens"
    return ""


def _kept(packed: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    is_complement = packed[:4] == _ALL_BUT
    token_ids = np.frombuffer(packed, dtype=_INT32, offset=4 if is_complement else 0)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ValueError(f"a set of kept tokens is not of this vocabulary of {vocab_size}")
    kept_V = np.full(vocab_size, is_complement, dtype=np.bool_)
    kept_V[token_ids] = not is_complement
    return kept_V
