"""Long sequences of numbers as one JSON string each: base64 of 32-bit integers or 64-bit floats,
little-endian. Pure. A tenth of the time that JSON takes for digits, and floats come back bit for
bit."""

from __future__ import annotations

import binascii
import sys
from array import array
from collections.abc import Sequence


def pack_ints(values: Sequence[int]) -> str | list[int]:
    """A list where one does not fit 32 bits."""
    try:
        return _pack(array("i", values))
    except OverflowError:
        return list(values)


def unpack_ints(packed: str | Sequence[int]) -> tuple[int, ...]:
    """What `pack_ints` made, or any JSON list of integers.

    Raises:
        ValueError: it is neither.
    """
    return tuple(array("i", _unpack(packed, 4)) if isinstance(packed, str) else packed)


def pack_floats(values: Sequence[float]) -> str:
    return _pack(array("d", values))


def unpack_floats(packed: str | Sequence[float]) -> tuple[float, ...]:
    """What `pack_floats` made, or any JSON list of numbers.

    Raises:
        ValueError: it is neither.
    """
    return tuple(array("d", _unpack(packed, 8)) if isinstance(packed, str) else packed)


def _pack(values: array[int] | array[float]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return binascii.b2a_base64(values.tobytes(), newline=False).decode("ascii")


def _unpack(packed: str, num_bytes: int) -> bytes:
    """In the machine's byte order; ``num_bytes`` each."""
    data = binascii.a2b_base64(packed, strict_mode=True)
    if len(data) % num_bytes:
        raise ValueError(f"{len(data)} bytes are no numbers of {num_bytes}")
    if sys.byteorder == "big":
        data = b"".join(data[i : i + num_bytes][::-1] for i in range(0, len(data), num_bytes))
    return data
