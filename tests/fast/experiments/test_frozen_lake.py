"""The embedded policy of `frozen_lake_tiny`, its tokenizer, its maps, and what it was taught."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import read_policy_facts
from torchtitan_rl.configs.frozen_lake_tiny import config as CONFIG
from torchtitan_rl.experiments.frozen_lake.task import POLICY_DIR, TASK
from torchtitan_rl.experiments.frozen_lake.tokenizer import build_backend, build_tokenizer
from torchtitan_rl.experiments.frozen_lake.walks import best_moves, walk
from torchtitan_rl.experiments.tiny_policy import demonstration
from torchtitan_rl.rollout.rendering import make_renderer

pytest.importorskip("gymnasium")


def test_the_embedded_tokenizer_is_the_one_that_the_code_builds() -> None:
    shipped = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))
    assert shipped.get_vocab() == build_backend().get_vocab()
    assert read_policy_facts(POLICY_DIR).vocab_size == shipped.get_vocab_size()


def test_the_ready_configuration_has_no_errors() -> None:
    machine = MachineFacts(num_cores=2, memory_bytes=16 << 30)
    found = find_errors(CONFIG, read_policy_facts(POLICY_DIR), machine)
    assert [message for message in found if not message.startswith("name is")] == []


def test_the_shortest_way_leads_to_the_goal_around_the_holes() -> None:
    rng = random.Random(0)
    for seed in range(20):
        moves = list(walk(TASK, seed, carelessness=0.0, rng=rng))
        assert len(moves) >= 2 * (TASK.size - 1)
        last, move = moves[-1]
        ahead = last.replace("[F]", "P").replace("\n", "")
        place = ahead.index("P")
        assert {"right": place + 1, "down": place + TASK.size}[move] == ahead.index("G")
    assert best_moves("[S]FF\nHHF\nFFG") == ["right"]
    assert best_moves("SFF\nH[F]F\nFFG") == ["down", "right"]


def test_the_longest_walk_fits_into_the_budgets() -> None:
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")
    for seed in range(20):
        moves = list(walk(TASK, seed, carelessness=0.5, rng=random.Random(seed)))
        assert len(moves) <= CONFIG.rollout.max_turns
        turns = [([{"role": "user", "content": seen}], move) for seen, move in moves]
        episode = demonstration("walk", turns, renderer=renderer, tokenizer=tokenizer)
        assert sum(episode.loss_mask) == 2 * len(moves)  # a word and the end
        assert len(episode.token_ids) <= 30 * len(moves)
    assert 30 * CONFIG.rollout.max_turns <= CONFIG.rollout.max_total_tokens
