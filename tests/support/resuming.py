"""Parts of tests that stop a rollout at any moment and continue it with another rollouter."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tests.support.async_tests import cancel
from tests.support.rollouts import PROBLEM, Factory, make_rollouter
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.records import (
    RecordedRollout,
    SavedRollout,
    restored_rollout,
    saved_rollout,
    to_bytes,
)
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    RoutedExperts,
    VersionRun,
)


@dataclass
class SeededGenerate:
    """Samples a token a tick from nothing but the request's seed and prompt; can be resumed. The
    experts of a token are its position."""

    version: int = 0
    vocabulary: Sequence[int] = range(1, 100)
    requests: list[GenerationRequest] = field(default_factory=list)
    partials: dict[str, Completion] = field(default_factory=dict)

    async def __call__(self, request: GenerationRequest, /) -> Completion:
        self.requests.append(request)
        rng = random.Random(f"{request.sampling.seed} {request.prompt_token_ids}")
        count = rng.randint(1, request.sampling.max_tokens)
        wanted = [rng.choice(self.vocabulary) for _ in range(count)]
        kept = request.resume_from.token_ids if request.resume_from else ()
        assert tuple(wanted[: len(kept)]) == kept
        for end in range(max(len(kept), 1), len(wanted) + 1):
            partial = Completion(
                request_id=request.request_id,
                token_ids=tuple(wanted[:end]),
                logprobs=tuple(-1 / token for token in wanted[:end]),
                version_runs=(VersionRun(0, self.version),),
                finish_reason=FinishReason.ABORT,
                routed_experts=positions(request, end),
            )
            self.partials[request.request_id] = partial
            await asyncio.sleep(0)
        del self.partials[request.request_id]
        return replace(partial, finish_reason=FinishReason.STOP)


def positions(request: GenerationRequest, num_sampled: int) -> RoutedExperts:
    end = len(request.prompt_token_ids) + num_sampled - 1
    data = bytes(position % 200 for position in range(request.routed_from, end))
    return RoutedExperts(data=data, num_layers=1, per_token=1)


class Counter:
    """Adds up what was sampled; ends after ``turns`` with the sum. Can neither save nor replay."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.sums: list[int] = []
        self.prompt: tuple[int, ...] = (1, 2)
        self.calls: list[str] = []

    @property
    def messages(self):
        return tuple({"role": "user", "content": str(total)} for total in self.sums)

    async def reset(self) -> Observation:
        self.calls.append("reset")
        await asyncio.sleep(0)
        return Observation(prompt_token_ids=self.prompt, stop_token_ids=(0,))

    async def step(self, completion: Completion) -> Observation | Terminal:
        self.calls.append("step")
        await asyncio.sleep(0)
        self.sums.append(sum(completion.token_ids))
        if len(self.sums) == self.turns:
            return Terminal(reward=float(sum(self.sums)), metrics={"turns": self.turns})
        self.prompt = (*self.prompt, *completion.token_ids, 0)
        return Observation(
            prompt_token_ids=self.prompt,
            max_tokens=3,
            turn_reward=self.sums[-1] / 7,
            turn_text=f"turn {len(self.sums)}",
        )

    async def finish(self, status) -> Terminal:
        await asyncio.sleep(0)
        return Terminal(reward=0.5 * sum(self.sums))

    async def close(self) -> None:
        self.calls.append("close")
        await asyncio.sleep(0)


class Replaying(Counter):
    replays = True


class Saving(Counter):
    """Starts with another prompt each time, so that only its state restores it."""

    made = 0

    def __init__(self, turns: int = 3) -> None:
        super().__init__(turns)
        Saving.made += 1
        self.prompt = (1, 2, 100 + Saving.made)

    async def state_dict(self):
        await asyncio.sleep(0)
        return {"sums": self.sums, "prompt": self.prompt}

    async def load_state_dict(self, state) -> None:
        self.sums, self.prompt = list(state["sums"]), tuple(state["prompt"])


def through_bytes(recorded: RecordedRollout) -> RecordedRollout:
    data = to_bytes(saved_rollout(recorded))
    return restored_rollout(msgspec.msgpack.decode(data, type=SavedRollout))


SIZE = 2
RUBRIC = Rubric([RewardFunction(name="twice", function=lambda rollout, _: 2 * rollout.reward)])


class Run:
    """One process's part of a group; records what its callbacks get."""

    def __init__(self, *makers, rubric=RUBRIC, version=0, **limits) -> None:
        self.generate = SeededGenerate(version=version)
        self.factory = Factory(*makers)
        self.records: dict[str, list] = {}
        self.discarded: list[tuple[str, str, int]] = []
        options = {"max_turns": 5, "max_tokens_per_turn": 3, **limits}
        self.rollouter = make_rollouter(
            self.factory, generate=self.generate, rubric=rubric, **options
        )

    @property
    def turns(self) -> list[tuple[str, int]]:
        return [(id_, index) for id_, lines in self.records.items() for index, *_ in lines]

    def on_turn(self, recorded) -> None:
        line = (len(recorded.turns) - 1, recorded.turns[-1], recorded.env_state)
        self.records.setdefault(recorded.rollout_id, []).append(line)

    def start(self, recorded=(), **options):
        return self.rollouter.run_group(
            "g",
            PROBLEM,
            size=SIZE,
            seed=7,
            recorded={entry.rollout_id: entry for entry in recorded},
            on_turn=self.on_turn,
            on_discard=lambda *args: self.discarded.append(args),
            **options,
        )

    def whole(self, recorded=(), **options):
        return asyncio.run(self.start(recorded, **options))

    def stopped_after(self, ticks: int, recorded=()):
        """The snapshot after so many turns of the event loop; None where the group is over."""
        return self._stopped(lambda tick, _: tick == ticks, recorded)

    def stopped_at(self, num_tokens: int):
        """The snapshot when so many tokens are there; None where the group ends before."""
        return self._stopped(lambda _, so_far: sampled_tokens(so_far) >= num_tokens, ())

    def _stopped(self, is_moment: Callable, recorded):
        async def scenario():
            task = asyncio.create_task(self.start(recorded))
            for tick in itertools.count(1):
                await asyncio.sleep(0)
                if task.done():
                    return None
                snapshot = self.rollouter.snapshot("g", self.generate.partials)
                if is_moment(tick, snapshot):
                    break
            records = {key: list(lines) for key, lines in self.records.items()}
            await cancel(task)
            self.records = records  # siblings may go on for a tick
            return snapshot

        snapshot = asyncio.run(scenario())
        return snapshot and tuple(map(through_bytes, snapshot))

    def closed(self) -> bool:
        return all(env.calls.count("close") == 1 for env in self.factory.made)


def stops(*makers, **limits):
    """A run and its snapshot, for every moment at which a group can be stopped."""
    for ticks in range(1, 1000):
        run = Run(*makers, **limits)
        recorded = run.stopped_after(ticks)
        if recorded is None:
            assert ticks > 10
            return
        yield run, recorded


def stops_by_tokens(new_run, every: int = 1):
    """The same by sampled tokens: with threads, ticks of the event loop differ between runs."""
    for num_tokens in itertools.count(1, every):
        run = new_run()
        recorded = run.stopped_at(num_tokens)
        if recorded is None:
            assert num_tokens > 5
            return
        yield run, recorded


def sampled_tokens(recorded) -> int:
    return sum(entry.num_tokens for entry in recorded)


def contents(group):
    """What the rollouts of a group consist of, without their ids."""
    return [(r.turns, r.status, r.reward, r.cause, r.messages, r.metrics) for r in group.rollouts]
