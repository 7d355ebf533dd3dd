"""Real renderers and the real task: replayed conversations have the very prompts of before."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from tests.real.test_rendering_fuzz import TOKENIZERS
from tests.support.resuming import Run, contents, stops_by_tokens
from torchtitan_rl.experiments.alphabet_sort.env import AlphabetSortEnv
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import make_renderer

NAMES = [["Zoe", "Adam"], ["Mia"], ["Ben", "Eve"]]
LIMITS = {"max_total_tokens": 4000, "max_tokens_per_turn": 6}


class Watched(MessageTokenEnv):
    """Notes its closing, as `Run.closed` wants."""

    def __init__(self, env, renderer) -> None:
        super().__init__(env, renderer)
        self.calls: list[str] = []

    async def close(self) -> None:
        self.calls.append("close")
        await super().close()


@pytest.mark.parametrize("name", ["policy", *TOKENIZERS])
def test_alphabet_sort_is_replayed_through_its_renderer(name):
    tokenizer = AutoTokenizer.from_pretrained(POLICY_DIR) if name == "policy" else TOKENIZERS[name]
    renderer = make_renderer(tokenizer)
    rng = random.Random(1)
    vocabulary = [rng.randrange(len(tokenizer)) for _ in range(100)]  # special tokens among them
    vocabulary[:20] = renderer.stop_token_ids * (20 // len(renderer.stop_token_ids))

    def new_run() -> Run:
        run = Run(lambda: Watched(AlphabetSortEnv(NAMES, power=2.0), renderer), **LIMITS)
        run.generate.vocabulary = vocabulary
        return run

    undisturbed = contents(new_run().whole())
    replayed = 0
    for _, recorded in stops_by_tokens(new_run, every=3):
        after = new_run()
        assert contents(after.whole(recorded)) == undisturbed
        assert after.discarded == []
        assert after.closed()
        replayed += any(entry.turns and not entry.ended for entry in recorded)
    assert replayed
