"""The embedded policies are the ones that the code of their experiments makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from torchtitan_rl.config.model import read_policy_facts
from torchtitan_rl.experiments.agent_libraries import task as agent_libraries
from torchtitan_rl.experiments.agent_libraries.warm_start import (
    build_tokenizer as libraries_tokenizer,
)
from torchtitan_rl.experiments.alphabet_sort import task as alphabet_sort
from torchtitan_rl.experiments.alphabet_sort.warm_start import build_backend as alphabet_backend
from torchtitan_rl.experiments.calculator_agent import task as calculator_agent
from torchtitan_rl.experiments.calculator_agent.warm_start import build_tokenizer as agent_tokenizer
from torchtitan_rl.experiments.code_interpreter import task as code_interpreter
from torchtitan_rl.experiments.code_interpreter.warm_start import build_backend as code_backend
from torchtitan_rl.experiments.frozen_lake import task as frozen_lake
from torchtitan_rl.experiments.frozen_lake.warm_start import build_backend as lake_backend
from torchtitan_rl.experiments.gsm8k import task as gsm8k
from torchtitan_rl.experiments.gsm8k.warm_start import build_tokenizer as words_tokenizer
from torchtitan_rl.experiments.reasoning_gym import task as reasoning_gym
from torchtitan_rl.experiments.reasoning_gym.warm_start import build_backend as gym_backend
from torchtitan_rl.experiments.search import task as search
from torchtitan_rl.experiments.search.warm_start import build_backend as search_backend

POLICIES: dict[str, tuple[Path, Callable[[], Any]]] = {
    "agent_libraries": (agent_libraries.POLICY_DIR, libraries_tokenizer),
    "alphabet_sort": (alphabet_sort.POLICY_DIR, alphabet_backend),
    "calculator_agent": (calculator_agent.POLICY_DIR, agent_tokenizer),
    "code_interpreter": (code_interpreter.POLICY_DIR, code_backend),
    "frozen_lake": (frozen_lake.POLICY_DIR, lake_backend),
    "gsm8k": (gsm8k.POLICY_DIR, words_tokenizer),
    "reasoning_gym": (reasoning_gym.POLICY_DIR, gym_backend),
    "search": (search.POLICY_DIR, search_backend),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_embedded_tokenizer_and_template_are_those_that_the_code_builds(name: str) -> None:
    folder, build = POLICIES[name]
    shipped, built = Tokenizer.from_file(str(folder / "tokenizer.json")), build()
    assert shipped.get_vocab() == built.get_vocab()
    assert read_policy_facts(folder).vocab_size == shipped.get_vocab_size()
    if template := getattr(built, "chat_template", None):
        assert (folder / "chat_template.jinja").read_text() == template
        one, other = (
            json.loads(text) for text in (shipped.to_str(), built.backend_tokenizer.to_str())
        )
        for part in ("model", "pre_tokenizer", "added_tokens", "normalizer"):
            assert one[part] == other[part]


@pytest.mark.parametrize("name", POLICIES)
def test_an_embedded_policy_is_small_and_in_bfloat16(name: str) -> None:
    folder, _ = POLICIES[name]
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert 1e5 <= sum(prod(entry["shape"]) for entry in header.values()) <= 3e6
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8 << 20


@pytest.mark.parametrize("name", POLICIES)
def test_any_text_can_be_encoded_and_comes_back_unchanged(name: str) -> None:
    backend = Tokenizer.from_file(str(POLICIES[name][0] / "tokenizer.json"))
    for text in ("", " Zoë\n\t12", "\u2028 \0 \U0001f600 <|im_end", "العربية  ///"):
        assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text
