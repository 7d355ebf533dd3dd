"""The trainer's own layers on the CPU against plain torch and torchtitan, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from tests.support.episodes import batch_of, branching_episodes
from torchtitan_rl.backends.titan import model as layers
from torchtitan_rl.backends.titan.model import CpuFeedForward, FeedForward
from torchtitan_rl.backends.titan.tree_attention import TreeAttention, tree_mask_mod, tree_nodes
from torchtitan_rl.training.batch import predicted_mask
from torchtitan_rl.training.packing import rank_share
from torchtitan_rl.types import Episode

# isort: split
from torchtitan.models.common import Linear

NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 8


def subtree_ends(episodes: list[Episode], *, multiple: int = 1) -> torch.Tensor:
    """Of all episodes in one microbatch, padded."""
    batch = batch_of(episodes, row_len=64)
    (part,) = rank_share(
        batch,
        predicted_mask(batch),
        max_tokens=10_000,
        padding_multiple=multiple,
        share_prefixes=True,
        rank=0,
        num_ranks=1,
    ).parts
    return torch.from_numpy(part.subtree_end_T)


def visible(ends_T: torch.Tensor) -> torch.Tensor:
    index_T = torch.arange(len(ends_T))
    return (index_T <= index_T[:, None]) & (index_T[:, None] < ends_T)


def inputs(num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values [1, T, heads, H]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(
            1, num_tokens, heads, HEAD_DIM, dtype=torch.float64, generator=generator
        ).requires_grad_()
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    )


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_T: torch.Tensor) -> torch.Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible(ends_T), enable_gqa=True)
    return out.transpose(1, 2)


@settings(max_examples=40)
@given(episodes=branching_episodes(max_len=64, max_episodes=8), multiple=st.sampled_from([1, 8]))
def test_output_and_gradients_equal_those_under_the_dense_mask(
    episodes: list[Episode], multiple: int
) -> None:
    check_against_the_dense_mask(subtree_ends(episodes, multiple=multiple))


def test_they_do_so_where_nodes_are_longer_than_the_kernels_blocks() -> None:
    stem, branch, other = [1500] * 800, [1200] * 400, [1500] * 300
    check_against_the_dense_mask(torch.tensor([*stem, *branch, *other, *[1530] * 30]))


def check_against_the_dense_mask(ends_T: torch.Tensor) -> None:
    q, k, v = inputs(len(ends_T), seed=len(ends_T))
    attention = TreeAttention.Config().build()
    found = attention(q, k, v, attention_masks=tree_nodes(ends_T))
    expected = dense(q, k, v, ends_T)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@given(episodes=branching_episodes(max_len=64, max_episodes=8))
def test_nodes_cover_every_visible_pair_once_and_nothing_else(episodes: list[Episode]) -> None:
    ends_T = subtree_ends(episodes)
    seen = np.zeros((len(ends_T), len(ends_T)), dtype=int)
    for start, stop, end, is_root in tree_nodes(ends_T).tolist():
        assert is_root == (not seen[start].any())
        seen[start:end, start:stop] += np.tri(end - start, stop - start, dtype=int)
    assert np.array_equal(seen, visible(ends_T).numpy())


@settings(max_examples=20)
@given(episodes=branching_episodes(max_len=64, max_episodes=8), multiple=st.sampled_from([1, 128]))
def test_the_mask_of_flex_attention_is_the_dense_one(
    episodes: list[Episode], multiple: int
) -> None:
    ends_T = subtree_ends(episodes, multiple=multiple)
    size = len(ends_T)
    mask = create_mask(tree_mask_mod(ends_T), 1, 1, size, size, device="cpu")
    assert torch.equal(mask[0, 0], visible(ends_T))


def test_flex_attention_under_that_mask_gives_the_same_output() -> None:
    """The forward pass, which flex has on the CPU."""
    ends_T = torch.tensor([140] * 60 + [100] * 40 + [140] * 40 + [200] * 60)
    q, k, v = (x.detach() for x in inputs(len(ends_T), seed=0))
    block_mask = create_block_mask(tree_mask_mod(ends_T), 1, None, 200, 200, device="cpu")
    out = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), dense(q, k, v, ends_T))


@pytest.mark.parametrize("shape", [(7, 16), (1, 5, 3, 16)])
def test_norms_equal_torchs(shape: tuple[int, ...]) -> None:
    norm = layers.CpuRMSNorm.Config(normalized_shape=16, eps=1e-3).build().double()
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    found, expected = norm(x), F.rms_norm(x, (16,), norm.weight, 1e-3)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (x, norm.weight), upstream),
        torch.autograd.grad(expected, (x, norm.weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(7, 8), (2, 5, 8)])
def test_feed_forward_layers_equal_torchtitans(shape: tuple[int, ...]) -> None:
    w1, w2 = (Linear.Config(in_features=a, out_features=b) for a, b in ((8, 24), (24, 8)))
    ours = CpuFeedForward.Config(w1=w1, w2=w2, w3=w1).build().double()
    titans = FeedForward.Config(w1=w1, w2=w2, w3=w1).build().double()
    titans.load_state_dict(ours.state_dict())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    found, expected = ours(x), titans(x)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (x, *ours.parameters()), upstream),
        torch.autograd.grad(expected, (x, *titans.parameters()), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_rotations_equal_torchtitans() -> None:
    rope = layers.ScaledRoPE.Config(dim=8, max_seq_len=20).build()
    titan = layers.CosSinRoPE.Config(dim=8, max_seq_len=20).build()
    positions = torch.tensor([[0, 1, 2, 3, 2, 19]])
    q, k, _ = inputs(6, seed=1)
    q, k = (x.detach().float().requires_grad_() for x in (q, k))
    found, expected = rope(q, k, positions), titan(q, k, positions)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    sums = [sum((x * x.detach().sin()).sum() for x in pair) for pair in (found, expected)]
    for one, other in zip(*(torch.autograd.grad(total, (q, k)) for total in sums), strict=True):
        torch.testing.assert_close(one, other)
