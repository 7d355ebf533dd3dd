"""The embedded policy of `reasoning_gym_tiny`, its tokenizer, and what it was taught."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import read_policy_facts
from torchtitan_rl.configs import gsm_symbolic_smollm2, reasoning_gym_tiny
from torchtitan_rl.experiments.reasoning_gym.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.reasoning_gym.tokenizer import build_backend
from torchtitan_rl.experiments.reasoning_gym.warm_start import careless

pytest.importorskip("reasoning_gym")
CONFIG = reasoning_gym_tiny.config


def test_the_embedded_tokenizer_is_the_one_that_the_code_builds() -> None:
    shipped = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))
    assert shipped.get_vocab() == build_backend().get_vocab()
    assert read_policy_facts(POLICY_DIR).vocab_size == shipped.get_vocab_size()


def test_the_ready_configurations_have_no_errors() -> None:
    machine = MachineFacts(num_cores=2, memory_bytes=16 << 30)
    found = find_errors(CONFIG, read_policy_facts(POLICY_DIR), machine)
    assert [message for message in found if not message.startswith("name is")] == []
    assert gsm_symbolic_smollm2.config.task.errors() == []


def test_questions_and_right_answers_fit_into_the_budgets() -> None:
    encode, source = build_backend().encode, TASK.dataset("train", seed=0)
    for _ in range(100):
        data = source.next().data
        chat = f"<|im_start|>user\n{data['question']}<|im_end|>\n<|im_start|>assistant\n"
        prompt, answer = len(encode(chat).ids), len(encode(data["answer"]).ids) + 1
        assert answer <= CONFIG.rollout.sampling.max_tokens_per_turn
        assert prompt + answer <= CONFIG.rollout.max_total_tokens


def test_careless_answers_are_wrong_by_a_little() -> None:
    rng = random.Random(0)
    assert careless("12", 0.0, rng) == "12"
    assert abs(int(careless("-3", 1.0, rng)) + 3) in (1, 2, 3)
    words = {careless("abc", 1.0, rng) for _ in range(50)}
    assert len(words) > 1
    assert all(sorted(word) == list("abc") for word in words)
