"""Grammars replayed on sampled tokens, against the matcher that would have sampled them."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.episodes import make_episode
from torchtitan_rl.configs.calculator_agent_tiny import config
from torchtitan_rl.orchestration.batching import GrammarReplay, without_grammars
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_bits, kept_of_each
from torchtitan_rl.types import Episode, Grammar, KeptRun

xgrammar = pytest.importorskip("xgrammar")
TOKENIZER = AutoTokenizer.from_pretrained(config.policy.checkpoint)
VOCAB_SIZE, END = len(TOKENIZER), TOKENIZER.eos_token_id
PROMPT = [1, 2, 3]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def compiler() -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=VOCAB_SIZE)
    return xgrammar.GrammarCompiler(info, max_threads=1)


@pytest.fixture(scope="module")
def compiled(compiler: Any) -> dict[str, Any]:
    return {
        "json": compiler.compile_json_schema(json.dumps(SCHEMA)),
        "regex": compiler.compile_regex("[a-c]{3,5}x?"),
        "ebnf": compiler.compile_grammar('root ::= "a" [0-9]+ "b"'),
    }


def sample(grammar: Any, seed: int) -> tuple[list[int], list[np.ndarray]]:
    """Random tokens under the grammar to its end, and what each was drawn from."""
    rng = np.random.default_rng(seed)
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[END])
    bits = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    tokens: list[int] = []
    allowed: list[np.ndarray] = []
    while not matcher.is_terminated() and len(tokens) < 40:
        bits.fill_(-1)
        matcher.fill_next_token_bitmask(bits)
        row = np.unpackbits(bits.numpy().view(np.uint8)[0], count=VOCAB_SIZE, bitorder="little")
        tokens.append(int(rng.choice(np.flatnonzero(row))))
        allowed.append(row)
        assert matcher.accept_token(tokens[-1])
    return tokens, allowed


def episode_of(grammar: Any, tokens: list[int], data: bytes | None = None) -> Episode:
    mask = [False] * len(PROMPT) + [True] * len(tokens)
    data = data or zlib.compress(grammar.grammar.serialize_json().encode())
    recorded = Grammar(data=data, stop_token_ids=(END,))
    return replace(
        make_episode([*PROMPT, *tokens], mask),
        kept_tokens=(KeptRun(0, WHOLE_VOCABULARY), KeptRun(len(PROMPT), recorded)),
    )


@pytest.mark.parametrize("kind", ["json", "regex", "ebnf"])
def test_a_replay_gives_the_very_tokens_that_were_sampled_from(compiled: Any, kind: str) -> None:
    replay = GrammarReplay(TOKENIZER, VOCAB_SIZE)
    for seed in range(5):
        tokens, allowed = sample(compiled[kind], seed)
        replayed = replay(episode_of(compiled[kind], tokens))
        assert replayed.loss_mask == (False,) * 3 + (True,) * len(tokens)
        packed = kept_of_each(replayed.kept_tokens, len(replayed.token_ids))[3:]
        bits = kept_bits([one for one in packed if isinstance(one, bytes)], VOCAB_SIZE)
        assert (np.unpackbits(bits, axis=1, count=VOCAB_SIZE, bitorder="little") == allowed).all()


def test_after_its_end_a_grammar_allows_everything(compiled: Any) -> None:
    tokens, _ = sample(compiled["ebnf"], 0)
    assert tokens[-1] == END
    replay = GrammarReplay(TOKENIZER, VOCAB_SIZE)
    replayed = replay(episode_of(compiled["ebnf"], [*tokens, 7, 8]))
    assert replayed.kept_tokens[-1] == (len(replayed.token_ids) - 2, WHOLE_VOCABULARY)
    assert replayed.num_trained_tokens == len(tokens) + 2


def test_tokens_from_the_first_one_that_does_not_fit_have_no_loss(compiled: Any) -> None:
    tokens, allowed = sample(compiled["regex"], 1)
    wrong = int(np.flatnonzero(allowed[2] == 0)[0])
    episode = episode_of(compiled["regex"], [*tokens[:2], wrong, *tokens[3:]])
    replayed = GrammarReplay(TOKENIZER, VOCAB_SIZE)(episode)
    assert replayed.loss_mask == (False,) * 3 + (True,) * 2 + (False,) * (len(tokens) - 2)
    assert replayed.kept_tokens[-1] == (5, None)


def test_a_grammar_of_another_version_leaves_its_tokens_without_loss(compiled: Any) -> None:
    tokens, _ = sample(compiled["json"], 2)
    text = compiled["json"].grammar.serialize_json().replace('"__VERSION__":"v', '"__VERSION__":"w')
    episode = episode_of(compiled["json"], tokens, data=zlib.compress(text.encode()))
    assert GrammarReplay(TOKENIZER, VOCAB_SIZE)(episode) == without_grammars(episode)
    assert without_grammars(episode).num_trained_tokens == 0
