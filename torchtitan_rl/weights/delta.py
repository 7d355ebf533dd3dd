"""What changed between two versions of the same packed bytes, compressed without loss.

After an optimizer step most high bits of the weights are what they were. The two versions are
combined by XOR, so that unchanged bits are 0; the first bytes of all elements are put together,
then the second ones, and so on, since in float32 the low bytes change all the time and the high
ones rarely; and zstd compresses the result. Decoding restores the new bytes bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import zstandard

_BLOCK_BYTES = 4 << 20  # encoded together: the planes of a block stay in the cache
_LEVEL = 1
_SAMPLED = 32  # one block of so many is encoded to see what a delta would be

Bytes = npt.NDArray[np.uint8]


def encode(old: Bytes, new: Bytes, *, itemsize: int) -> list[bytes]:
    """The compressed blocks that turn ``old`` into ``new`` (uint8, of equal length).

    Args:
        itemsize: of the elements, or of most: others compress less.
    """
    return [_encode_block(old[at], new[at], itemsize) for at in _blocks(len(old))]


def decode(blocks: Sequence[bytes | memoryview], data: Bytes, *, itemsize: int) -> None:
    """Turn ``data``, the old bytes, into the new ones in place.

    Raises:
        ValueError: the blocks are damaged, or not of as many bytes.
    """
    places = list(_blocks(len(data)))
    if len(blocks) != len(places):
        raise ValueError(f"{len(blocks)} blocks for {len(data)} bytes")
    decompressor = zstandard.ZstdDecompressor()
    for block, at in zip(blocks, places, strict=True):
        place = data[at]
        try:
            changed = decompressor.decompress(block, max_output_size=len(place))
        except zstandard.ZstdError as error:
            raise ValueError(f"a block of {len(block)} bytes: {error}") from error
        if len(changed) != len(place):
            raise ValueError(f"a block of {len(changed)} bytes instead of {len(place)}")
        elements = place.reshape(_shape(len(place), itemsize))
        elements ^= np.frombuffer(changed, dtype=np.uint8).reshape(elements.shape[::-1]).T


def sampled_share(old: Bytes, new: Bytes, *, itemsize: int) -> float:
    """About how large the delta is, as a share of the bytes, by one in 32 blocks."""
    places = list(_blocks(len(old)))
    sample = places[len(places) // 2 % _SAMPLED :: _SAMPLED]
    encoded = sum(len(_encode_block(old[at], new[at], itemsize)) for at in sample)
    return encoded / float(sum(at.stop - at.start for at in sample))


def _encode_block(old: Bytes, new: Bytes, itemsize: int) -> bytes:
    changed = np.bitwise_xor(old, new).reshape(_shape(len(old), itemsize))
    planes = np.ascontiguousarray(changed.T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)


def _shape(num_bytes: int, itemsize: int) -> tuple[int, int]:
    """Elements and their bytes."""
    itemsize = itemsize if num_bytes % itemsize == 0 else 1
    return num_bytes // itemsize, itemsize


def _blocks(num_bytes: int) -> Iterator[slice]:
    for start in range(0, num_bytes, _BLOCK_BYTES):
        yield slice(start, min(start + _BLOCK_BYTES, num_bytes))
