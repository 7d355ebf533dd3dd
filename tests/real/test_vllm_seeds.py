"""Seeds that are drawn ahead against vLLM's own CPU sampler."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl.adapters.vllm_seeds import draw_seeds_ahead

pytest.importorskip("vllm")

_ROWS, _VOCAB, _STEPS = 6, 390, 150  # more steps than are drawn at once


class _Batch:
    """The rows of a model runner's batch, as far as seeds go."""

    def __init__(self) -> None:
        self.generators: dict[int, torch.Generator] = {}

    def add_request(self, state: SimpleNamespace) -> None:
        if state.generator is not None:
            self.generators[state.row] = state.generator


def sampled(*, is_ahead: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [steps, rows] and logprobs [steps, rows, vocabulary] of some seeded rows and some
    that are not, one of which is given up and taken by another, and one put elsewhere."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    runner = SimpleNamespace(
        input_batch=_Batch(),
        sampler=SimpleNamespace(topk_topp_sampler=TopKTopPSampler("processed_logprobs")),
    )
    if is_ahead:
        draw_seeds_ahead(runner)
    batch, sampler = runner.input_batch, runner.sampler.topk_topp_sampler
    torch.manual_seed(7)
    logits = torch.Generator().manual_seed(8)
    states = [
        SimpleNamespace(row=row, generator=torch.Generator().manual_seed(row) if row != 2 else None)
        for row in range(_ROWS)
    ]
    for state in states[:-1]:
        batch.add_request(state)
    k = torch.tensor([5, 390, 390, 50, 390, 390])
    tokens, logprobs = [], []
    for step in range(_STEPS):
        if step == 20:
            batch.generators.pop(1)
        if step == 30:
            states[-1].row = 1
            batch.add_request(states[-1])
        if step == 40:  # preempted, and back on another row
            states[0].row = 5
            batch.generators.pop(0)
            batch.add_request(states[0])
        given = torch.randn(_ROWS, _VOCAB, generator=logits) * 3
        ids, row_logprobs = sampler.forward(given, batch.generators, k if step % 2 else None, None)
        tokens.append(ids)
        logprobs.append(row_logprobs)
    return torch.stack(tokens), torch.stack(logprobs)


def test_what_is_sampled_is_what_vllm_samples_bit_for_bit() -> None:
    tokens, logprobs = sampled(is_ahead=True)
    own_tokens, own_logprobs = sampled(is_ahead=False)
    assert torch.equal(tokens, own_tokens)
    assert torch.equal(logprobs, own_logprobs)
    assert len(tokens[:, 1].unique()) > 20


def test_another_sampler_is_left_as_it_is() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler = TopKTopPSampler("raw_logprobs")
    batch = _Batch()
    draw_seeds_ahead(
        SimpleNamespace(input_batch=batch, sampler=SimpleNamespace(topk_topp_sampler=sampler))
    )
    assert sampler.forward == sampler.forward_cpu
    generator = torch.Generator()
    batch.add_request(SimpleNamespace(row=0, generator=generator))
    assert batch.generators[0] is generator
