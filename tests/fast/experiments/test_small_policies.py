"""Questions, walks and answers of the small ready runs fit into their budgets."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_rl.configs import (
    frozen_lake_tiny,
    gsm8k_tiny,
)
from torchtitan_rl.experiments.calculator_agent.dataset import make_problem
from torchtitan_rl.experiments.frozen_lake import task as lake
from torchtitan_rl.experiments.frozen_lake.warm_start import best_moves, build_tokenizer, walk
from torchtitan_rl.experiments.gsm8k import task as words
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile, main, row
from torchtitan_rl.experiments.gsm8k.warm_start import build_tokenizer as words_tokenizer
from torchtitan_rl.experiments.tiny_policy import demonstration
from torchtitan_rl.rollout.rendering import make_renderer


def test_the_shortest_way_leads_to_the_goal_around_the_holes() -> None:
    pytest.importorskip("gymnasium")
    rng = random.Random(0)
    for seed in range(20):
        moves = list(walk(lake.TASK, seed, carelessness=0.0, rng=rng))
        assert len(moves) >= 2 * (lake.TASK.size - 1)
        last, move = moves[-1]
        ahead = last.replace("[F]", "P").replace("\n", "")
        place = ahead.index("P")
        assert {"right": place + 1, "down": place + lake.TASK.size}[move] == ahead.index("G")
    assert best_moves("[S]FF\nHHF\nFFG") == ["right"]
    assert best_moves("SFF\nH[F]F\nFFG") == ["down", "right"]


def test_the_longest_walk_fits_into_the_budgets() -> None:
    pytest.importorskip("gymnasium")
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")
    for seed in range(20):
        moves = list(walk(lake.TASK, seed, carelessness=0.5, rng=random.Random(seed)))
        assert len(moves) <= frozen_lake_tiny.config.rollout.max_turns
        turns = [([{"role": "user", "content": seen}], move) for seen, move in moves]
        episode = demonstration("walk", turns, renderer=renderer, tokenizer=tokenizer)
        assert sum(episode.loss_mask) == 2 * len(moves)  # a word and the end
        assert len(episode.token_ids) <= 30 * len(moves)
    assert (
        30 * frozen_lake_tiny.config.rollout.max_turns
        <= frozen_lake_tiny.config.rollout.max_total_tokens
    )


@pytest.mark.parametrize("made", words.MADE, ids=lambda made: made.output.name)
def test_the_files_are_what_the_code_makes(made: MakeFile, tmp_path: Path) -> None:
    main(replace(made, output=tmp_path / "again"))
    assert (tmp_path / "again").read_text() == made.output.read_text()


def test_questions_and_right_solutions_fit_into_the_budgets() -> None:
    encode, source = words_tokenizer().encode, words.TASK.dataset("train", seed=0)
    for number in range(200):
        content = source.next().data["messages"][0]["content"]
        prompt = encode(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
        solution = encode(row(make_problem("train", number, words.SIZES).data)["answer"])
        assert len(solution) < gsm8k_tiny.config.rollout.sampling.max_tokens_per_turn
        assert len(prompt) + 40 <= gsm8k_tiny.config.rollout.max_total_tokens
