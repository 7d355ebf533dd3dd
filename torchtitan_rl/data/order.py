"""Shuffled orders that take no memory: a permutation that is computed one position at a time.

Its key alone determines it, on every machine and with every version of every library, so the
position is all that a checkpoint has to hold.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 4


def shuffled(position: int, size: int, *, key: str) -> int:
    """The image of ``position`` under a permutation of ``range(size)``.

    A Feistel network permutes the smallest square power of two that holds ``size``; images outside
    of the range are permuted again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002, method 2).

    >>> sorted(shuffled(position, 5, key="epoch 0") for position in range(5))
    [0, 1, 2, 3, 4]

    Raises:
        ValueError: ``position`` is not in the range.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is not in range({size})")
    half = ((size - 1).bit_length() + 1) // 2
    index = position
    while True:
        index = _permute(index, half, key)
        if index < size:
            return index


def _permute(index: int, half: int, key: str) -> int:
    """Of ``2 * half`` bits."""
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for number in range(_ROUNDS):
        digest = blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right
