"""What is read from a sampler's distribution, for the requests that are recorded alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan_rl.backends.vllm.sampling import KeptSets
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_to_json

VOCAB_SIZE = 400
NAMES = ["small", "not recorded", "large", "whole", "nan", "nearly whole"]


class Sampler:
    """Draws token 0 from the distributions that it is given, as vLLM's two samplers return it."""

    def sample(self, logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(logits)), logits


def distributions() -> torch.Tensor:
    logits = torch.zeros(len(NAMES), VOCAB_SIZE)
    logits[0, 3:] = logits[1, 3:] = logits[2, 200:] = logits[5, 399:] = -math.inf
    logits[4] = math.nan
    return logits


@pytest.mark.parametrize("is_v2", [False, True])
def test_the_sets_of_recorded_requests_are_read_up_to_their_largest_size(is_v2: bool) -> None:
    kept = KeptSets(max_tokens=8)
    runner = SimpleNamespace(
        sampler=Sampler(),
        input_batch=SimpleNamespace(req_ids=NAMES),
        req_states=SimpleNamespace(index_to_req_id=dict(zip(range(9, 3, -1), NAMES, strict=True))),
    )
    kept.observe(runner, is_v2=is_v2)
    mappings = (None, None, np.arange(9, 3, -1))
    for name in ["small", "large", "whole", "nan", "nearly whole", "in no batch"]:
        kept.record(name)
    sampled, processed = runner.sampler.sample(distributions(), *mappings)
    assert (len(sampled), len(processed)) == (len(NAMES), len(NAMES))
    assert kept_to_json(kept["small"]) == [0, 1, 2]
    assert kept_to_json(kept["nearly whole"]) == {"all_but": [399]}
    assert (kept["large"], kept["whole"], kept["nan"]) == (None, *[WHOLE_VOCABULARY] * 2)
    kept.forget("small")
    with pytest.raises(KeyError):
        kept["small"]
