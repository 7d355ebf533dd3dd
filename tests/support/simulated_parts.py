"""Environments, a dataset and a recorder for simulated runs: small, and real in what the controller
sees of them. Replica and trainer are in files of their own."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from tests.support.simulated_faults import Fate, Strike, Undisturbed
from tests.support.simulated_replica import VOCAB
from torchtitan_rl.errors import TeacherError
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    EvaluationRecord,
    HeldOutRecord,
    StepRecord,
)
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.task import Outcome
from torchtitan_rl.rollout.tree import LimitReachedError, TurnTree
from torchtitan_rl.types import Completion, Problem, RolloutStatus, TokenScores


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Of an environment; shares are of its calls."""

    turns: int = 2
    reward_levels: int = 5
    turn_reward_levels: int = 0  # without trees; 0: turns have no rewards
    env_fails: float = 0.0
    env_hangs: float = 0.0
    env_delay_s: float = 1.0


class _Simulated:
    """The reward is a hash of what was sampled."""

    replays = True

    def __init__(
        self,
        problem: Problem,
        habits: Habits,
        chance: random.Random,
        answered: list[Completion],
        fate: Fate | None = None,
    ) -> None:
        self._answered = answered
        self._prompt: tuple[int, ...] = (1, problem.data["seed"] % VOCAB)
        self._habits = habits
        self._chance = chance
        self._fate = fate or Undisturbed()
        self._turns = 0

    async def finish(self, status: RolloutStatus) -> Terminal:
        strike = await self._strike("finish")
        if strike is not None and strike.action == "nonsense":
            return Terminal(reward=float("nan"))
        return self._terminal()

    async def close(self) -> None:
        await self._strike("close")

    def _terminal(self) -> Terminal:
        levels = self._habits.reward_levels
        return Terminal(reward=float(zlib.crc32(bytes(self._prompt)) % levels))

    async def _strike(self, method: str) -> Strike | None:
        strike = self._fate.at(f"env.{method}")
        if strike is not None and strike.action == "late":
            await asyncio.sleep(strike.seconds)
        if strike is not None and strike.action == "raise":
            raise RuntimeError("the environment failed as planned")
        return strike

    async def _delay(self) -> None:
        if self._chance.random() < self._habits.env_hangs:
            await asyncio.sleep(10_000.0)
        await asyncio.sleep(self._chance.uniform(0.0, self._habits.env_delay_s))


class SimEnv(_Simulated):
    """A turn is the prompt so far and a separator."""

    async def reset(self) -> Observation:
        strike = await self._strike("reset")
        await self._delay()
        if strike is not None and strike.action == "nonsense":
            return "an observation"  # type: ignore[return-value]
        return Observation(prompt_token_ids=self._prompt)

    async def step(self, completion: Completion) -> Observation | Terminal:
        strike = await self._strike("step")
        await self._delay()
        if self._chance.random() < self._habits.env_fails:
            raise RuntimeError("the environment failed by chance")
        if strike is not None and strike.action == "nonsense":
            return Observation(prompt_token_ids=())
        self._prompt = (*self._prompt, *completion.token_ids, 0)
        self._turns += 1
        self._answered.append(completion)
        levels = self._habits.turn_reward_levels
        earned = float(zlib.crc32(bytes(self._prompt)) % levels) if levels else None
        if self._turns == self._habits.turns:
            return replace(self._terminal(), turn_reward=earned)
        return Observation(prompt_token_ids=self._prompt, turn_reward=earned)


class SavedEnv(SimEnv):
    """Goes on from a saved state instead of by replaying."""

    replays = False

    async def state_dict(self) -> Any:
        return [list(self._prompt), self._turns]

    async def load_state_dict(self, state: Any) -> None:
        self._prompt, self._turns = tuple(state[0]), state[1]


class ForgetfulEnv(SimEnv):
    """Cannot be brought back."""

    replays = False


class SimTree(_Simulated):
    """Asks for its turns itself: the first one, then all others at once. It crashes by chance, and
    then begins again with what is recorded."""

    async def run(self, turns: TurnTree) -> Terminal:
        await self._strike("reset")
        for _ in range(2):
            await self._delay()
            if self._chance.random() < 0.7:
                break
            await turns.restart(replays=True)
            await self._ask(turns, self._prompt)
        await turns.restart(replays=True)
        sampled = [await self._ask(turns, self._prompt)]
        others = [(*self._prompt, *sampled[0], number) for number in range(self._habits.turns - 1)]
        sampled += await asyncio.gather(*(self._ask(turns, prompt) for prompt in others))
        strike = await self._strike("step")
        if strike is not None and strike.action == "nonsense":
            return "a terminal"  # type: ignore[return-value]
        self._prompt = tuple(token for tokens in sampled for token in tokens)
        return self._terminal()

    async def _ask(self, turns: TurnTree, prompt: tuple[int, ...]) -> tuple[int, ...]:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def take(completion: Completion) -> bool:
            if answer.done():
                return False
            answer.set_result(completion)
            return True

        with suppress(LimitReachedError):
            turns.request(Observation(prompt_token_ids=prompt), take)
        completion = await answer  # cancelled at a limit
        self._answered.append(completion)
        return completion.token_ids


class ForgetfulTree(SimTree):
    replays = False


ENVIRONMENTS = {
    "replays": SimEnv,
    "saved": SavedEnv,
    "forgetful": ForgetfulEnv,
    "tree": SimTree,
    "forgetful tree": ForgetfulTree,
}


class SimTeacher:
    """A `Teacher` whose logprob of a token depends on the token alone."""

    def __init__(
        self, chance: random.Random, seconds: float, fate: Fate, *, timeout_s: float
    ) -> None:
        self._chance = chance
        self._seconds = seconds
        self._timeout_s = timeout_s
        self._fate = fate
        self.scored: list[str] = []

    async def score(self, name: str, token_ids: tuple[int, ...]) -> TokenScores:
        strike = self._fate.at("teacher.score")
        await asyncio.sleep(self._seconds * self._chance.uniform(0.5, 2.0))
        if strike is not None and strike.action == "late":
            await asyncio.sleep(min(strike.seconds, self._timeout_s))
            if strike.seconds > self._timeout_s:
                raise TeacherError("the teacher's deadline has passed")
        if strike is not None and strike.action == "raise":
            raise TeacherError("the teacher failed as planned")
        self.scored.append(name)
        return TokenScores(logprobs=tuple(map(self.logprob, token_ids[1:])))

    @staticmethod
    def logprob(token: int) -> float:
        return -1.0 - token % 7

    def num_failures(self) -> int:
        return 0


class SimDataset:
    """Problems 0 .. ``size`` - 1, epoch after epoch, in another order each."""

    def __init__(self, size: int = 7, fate: Fate | None = None) -> None:
        self._size = size
        self._fate = fate or Undisturbed()
        self._position = 0
        self.drawn: list[str] = []  # ids of groups, in this life

    @property
    def epoch(self) -> int:
        return (self._position - 1) // self._size

    def next(self) -> Problem:
        if self._fate.at("dataset.next") is not None:
            raise StopIteration
        self._position += 1
        order = list(range(self._size))
        random.Random(self.epoch).shuffle(order)
        index = order[(self._position - 1) % self._size]
        self.drawn.append(f"e{self.epoch}/p{index}")
        return Problem(problem_id=f"p{index}", data={"seed": self._seed(index)})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]

    def _seed(self, index: int) -> int:
        return index


class SimCurriculum(SimDataset):
    """The same order, and problems that depend on all that it was told of the earlier ones."""

    _learned = 0

    def record(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            told = f"{one.problem.problem_id} {one.problem.data['seed']} {one.solved}"
            self._learned = zlib.crc32(told.encode(), self._learned)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "learned": self._learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._learned = state["learned"]

    def _seed(self, index: int) -> int:
        return index + 100 * (self._learned % 1000)


class Memory:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.held_out: list[HeldOutRecord] = []
        self.accounts: list[AccountRecord] = []
        self.said: list[str] = []

    def record_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def record_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)

    def record_held_out(self, record: HeldOutRecord) -> None:
        self.held_out.append(record)

    def record_account(self, record: AccountRecord) -> None:
        self.accounts.append(record)

    def phase(self, name: str) -> Any:
        return nullcontext()

    def say(self, message: str) -> None:
        self.said.append(message)
