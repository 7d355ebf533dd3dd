from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from tokenizers import Tokenizer

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import PolicyFacts, read_policy_facts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.configs import (
    alphabet_sort_qwen3_0_6b,
    alphabet_sort_smollm2,
    alphabet_sort_tiny,
)
from torchtitan_rl.experiments.alphabet_sort.prompts import user_message
from torchtitan_rl.experiments.alphabet_sort.scoring import right_answer
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR, AlphabetSortTask
from torchtitan_rl.experiments.alphabet_sort.tokenizer import build_backend

TINY = alphabet_sort_tiny.config
SMOLLM2 = PolicyFacts(
    num_heads=9, num_kv_heads=3, max_positions=8192, vocab_size=49152, num_bytes=269 << 20
)
QWEN3 = PolicyFacts(
    num_heads=16, num_kv_heads=8, max_positions=40960, vocab_size=151936, num_bytes=1200 << 20
)
LAPTOP = MachineFacts(num_cores=2, memory_bytes=16 << 30)
SIX_GPUS = MachineFacts(cuda_devices=tuple("012345"), num_cores=16, memory_bytes=256 << 30)


def weights_header() -> dict[str, Any]:
    """Names, types and shapes, as the safetensors format puts them in front."""
    with (POLICY_DIR / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def test_the_embedded_policy_has_one_to_three_million_bfloat16_parameters() -> None:
    header = weights_header()
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert 1e6 <= sum(prod(entry["shape"]) for entry in header.values()) <= 3e6
    assert sum(path.stat().st_size for path in POLICY_DIR.iterdir()) <= 8 << 20


def test_the_embedded_tokenizer_is_the_one_that_the_code_builds() -> None:
    shipped = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))
    assert shipped.get_vocab() == build_backend().get_vocab()
    assert read_policy_facts(POLICY_DIR).vocab_size == shipped.get_vocab_size()


@pytest.mark.parametrize(
    ("config", "policy", "machine"),
    [
        (TINY, read_policy_facts(POLICY_DIR), LAPTOP),
        (alphabet_sort_smollm2.config, SMOLLM2, LAPTOP),
        (alphabet_sort_qwen3_0_6b.config, QWEN3, SIX_GPUS),
    ],
)
def test_the_ready_configurations_have_no_errors(
    config: RunConfig, policy: PolicyFacts, machine: MachineFacts
) -> None:
    errors = find_errors(config, policy, machine)
    assert [message for message in errors if not message.startswith("name is")] == []


def test_right_answers_fit_into_the_budgets_of_the_default_run() -> None:
    task, rollout = TINY.task, TINY.rollout
    assert isinstance(task, AlphabetSortTask)
    turns = [["Mark"] * task.max_names for _ in range(task.max_turns)]
    encode = build_backend().encode
    total = 0
    for turn in range(task.max_turns):
        user = f"\n<|im_start|>user\n{user_message(turns, turn)}<|im_end|>\n<|im_start|>assistant\n"
        answer = len(encode("\n".join(right_answer(turns, turn))).ids) + 1
        assert answer <= rollout.sampling.max_tokens_per_turn
        total += len(encode(user).ids) + answer
    assert total <= rollout.max_total_tokens
    assert task.max_turns <= rollout.max_turns
