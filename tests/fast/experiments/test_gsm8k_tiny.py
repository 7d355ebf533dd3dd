"""The files and the embedded policy of `gsm8k_tiny`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import read_policy_facts
from torchtitan_rl.configs import gsm8k_tiny
from torchtitan_rl.experiments.calculator_agent.dataset import make_problem
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile, main, row
from torchtitan_rl.experiments.gsm8k.tiny import MADE, POLICY_DIR, SIZES, TASK
from torchtitan_rl.experiments.gsm8k.warm_start import build_tokenizer

CONFIG = gsm8k_tiny.config


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.output.name)
def test_the_files_are_what_the_code_makes(made: MakeFile, tmp_path: Path) -> None:
    main(replace(made, output=tmp_path / "again"))
    assert (tmp_path / "again").read_text() == made.output.read_text()


def test_the_embedded_tokenizer_is_the_one_that_the_code_builds() -> None:
    shipped = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))
    assert shipped.get_vocab() == build_tokenizer().get_vocab()
    assert read_policy_facts(POLICY_DIR).vocab_size == shipped.get_vocab_size()


def test_the_ready_configuration_has_no_errors() -> None:
    machine = MachineFacts(num_cores=2, memory_bytes=16 << 30)
    found = find_errors(CONFIG, read_policy_facts(POLICY_DIR), machine)
    assert [message for message in found if not message.startswith("name is")] == []


def test_questions_and_right_solutions_fit_into_the_budgets() -> None:
    encode, source = build_tokenizer().encode, TASK.dataset("train", seed=0)
    for number in range(200):
        content = source.next().data["messages"][0]["content"]
        prompt = encode(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
        solution = encode(row(make_problem("train", number, SIZES).data)["answer"])
        assert len(solution) < CONFIG.rollout.sampling.max_tokens_per_turn
        assert len(prompt) + 40 <= CONFIG.rollout.max_total_tokens
