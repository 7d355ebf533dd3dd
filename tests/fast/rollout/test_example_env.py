"""The environment that the README shows, and a policy that plays it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.support.rollouts import complete, make_rollouter
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.types import Problem, RolloutStatus

README = (Path(__file__).parents[3] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(SOURCE,) = (block for block in BLOCKS if "GuessEnv" in block)
SHOWN: dict[str, object] = {"__name__": "shown"}
exec(compile(SOURCE, "README.md", "exec"), SHOWN)
GuessEnv, HIGHER = SHOWN["GuessEnv"], SHOWN["HIGHER"]


async def bisect(request):
    """Guesses in the middle of what the hints in the prompt leave of 3 ... 99."""
    low, high = 3, 99
    history = request.prompt_token_ids[1:]
    for guess, hint in zip(history[::2], history[1::2], strict=True):
        low, high = (guess + 1, high) if hint == HIGHER else (low, guess - 1)
    return complete(request, [(low + high) // 2])


def play(max_turns: int):
    rollouter = make_rollouter(GuessEnv, generate=bisect, max_turns=max_turns)
    problem = Problem(problem_id="secret 42", data={"secret": 42})
    return asyncio.run(rollouter.run_group("g", problem, size=2, seed=0)).rollouts


def test_the_example_is_won_within_its_turns_and_is_one_episode():
    for rollout in play(max_turns=7):
        assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
        (episode,) = rollout_to_episodes(rollout, advantage=1.0)
        assert episode.num_trained_tokens == len(rollout.turns)
        assert episode.token_ids[-1] == 42


def test_the_example_is_at_most_thirty_lines():
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 30
