"""Deltas restore the new bytes bit for bit, and are small where little changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.weights import delta

SIZES = st.sampled_from([1, 2, 3, 7, 4096, 100_001])


@given(size=SIZES, itemsize=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 9))
def test_any_bytes_come_back(size: int, itemsize: int, seed: int) -> None:
    old, new = np.random.default_rng(seed).integers(0, 256, (2, size), dtype=np.uint8)
    restored = old.copy()
    delta.decode(delta.encode(old, new, itemsize=itemsize), restored, itemsize=itemsize)
    assert np.array_equal(restored, new)


def test_bytes_of_many_blocks_come_back() -> None:
    old = np.arange(9 << 20, dtype=np.uint8)
    new = old.copy()
    new[5 << 20 :: 1000] += 1
    blocks = delta.encode(old, new, itemsize=4)
    assert len(blocks) == 3
    delta.decode(blocks, old, itemsize=4)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(
    ("dtype", "learning_rate", "share"),
    [
        (torch.bfloat16, 1e-6, 0.05),
        (torch.bfloat16, 1e-4, 0.35),
        (torch.float32, 1e-6, 0.5),
    ],
)
def test_a_step_with_a_small_learning_rate_changes_few_bits(
    dtype: torch.dtype, learning_rate: float, share: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(0.02 * torch.randn(1 << 16, generator=generator))
    optimizer = torch.optim.AdamW([weight], lr=learning_rate)
    weight.grad = torch.randn(1 << 16, generator=generator)
    old = weight.detach().to(dtype, copy=True).view(torch.uint8).numpy()
    optimizer.step()
    new = weight.detach().to(dtype).view(torch.uint8).numpy()
    itemsize = dtype.itemsize
    assert sum(map(len, delta.encode(old, new, itemsize=itemsize))) < share * len(old)
    assert delta.sampled_share(old, new, itemsize=itemsize) < share


def test_damaged_blocks_are_refused() -> None:
    old, new = np.zeros((2, 5000), dtype=np.uint8)
    (block,) = delta.encode(old, new, itemsize=1)
    for blocks in ([], [block, block], [block[:-3]], [b"nothing"]):
        with pytest.raises(ValueError, match=r"block|bytes"):
            delta.decode(blocks, old, itemsize=1)
    with pytest.raises(ValueError, match="5000 bytes"):
        delta.decode([block], np.zeros(4000, dtype=np.uint8), itemsize=1)
