"""The environment that the README shows, between the two marks, and a policy that plays it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.rollouts import complete, config

# [README
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.types import Completion, Problem, RolloutStatus

START, LOWER, HIGHER = 0, 1, 2  # token ids; a guess is any other token


class GuessEnv:
    """Guess the secret token. Each wrong guess is answered by LOWER or HIGHER."""

    def __init__(self, problem: Problem) -> None:
        self.secret: int = problem.data["secret"]
        self.tokens: tuple[int, ...] = (START,)

    async def reset(self) -> Observation:
        return Observation(prompt_token_ids=self.tokens, max_tokens=1)

    async def step(self, completion: Completion) -> Observation | Terminal:
        guess = completion.token_ids[0] if completion.token_ids else START
        if guess == self.secret:
            return Terminal(reward=1.0)
        hint = HIGHER if guess < self.secret else LOWER
        self.tokens += (*completion.token_ids, hint)  # extend, and the rollout is one episode
        return Observation(prompt_token_ids=self.tokens, max_tokens=1)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0)  # no turns, tokens or time left

    async def close(self) -> None: ...


# README]


async def bisect(request):
    """Guesses in the middle of what the hints in the prompt leave of 3 ... 99."""
    low, high = 3, 99
    history = request.prompt_token_ids[1:]
    for guess, hint in zip(history[::2], history[1::2], strict=True):
        low, high = (guess + 1, high) if hint == HIGHER else (low, guess - 1)
    return complete(request, [(low + high) // 2])


def play(max_turns: int):
    rollouter = Rollouter(generate=bisect, environment=GuessEnv, config=config(max_turns=max_turns))
    problem = Problem(problem_id="secret 42", data={"secret": 42})
    return asyncio.run(rollouter.run_group("g", problem, size=2, seed=0)).rollouts


def test_the_example_is_won_within_its_turns_and_is_one_episode():
    for rollout in play(max_turns=7):
        assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
        (episode,) = rollout_to_episodes(rollout, advantage=1.0)
        assert episode.num_trained_tokens == len(rollout.turns)
        assert episode.token_ids[-1] == 42


def test_the_example_is_worth_nothing_when_its_turns_are_used_up():
    for rollout in play(max_turns=2):
        assert (rollout.status, rollout.reward) == (RolloutStatus.MAX_TURNS, 0.0)


def test_the_example_is_at_most_thirty_lines():
    shown = Path(__file__).read_text().split("# [README\n")[1].split("# README]")[0]
    assert len([line for line in shown.splitlines() if line.strip()]) <= 30
