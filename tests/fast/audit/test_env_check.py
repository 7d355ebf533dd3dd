"""``torchtitan-rl env check``: each of the usual mistakes, by an environment that makes it."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.rollouts import CountingEnv, config
from torchtitan_rl.audit import env as env_check
from torchtitan_rl.audit.env import CheckedProblem, EnvChecker, ScriptedPolicy
from torchtitan_rl.audit.findings import Mistake, describe_rollout
from torchtitan_rl.rollout.env import Observation, Terminal, threaded
from torchtitan_rl.rollout.rubric import Rubric
from torchtitan_rl.types import Completion, Problem, RolloutStatus

BLOCKS_S, MAX_BLOCK_S = 0.1, 0.05
COMPUTES_S, MAX_WHILE_COMPUTING_S = 0.01, 0.25
WAITS_S, MAX_WHILE_WAITING_S = 0.6, 0.5


VOCAB_SIZE = 1000


class Tokenizer:
    """A token for each letter."""

    eos_token_id = 3

    def encode(self, text: str, **options: object) -> list[int]:
        return [ord(letter) for letter in text]


def check(
    make: Callable[[], object],
    *,
    rubric: Rubric | None = None,
    max_block_s: float = 60.0,
    **limits: Any,
) -> CheckedProblem:
    """Of the second problem, when caches are warm."""
    policy = ScriptedPolicy(Tokenizer(), ["ab", "c"], vocab_size=VOCAB_SIZE)
    checker = EnvChecker(
        environment=lambda problem: make(),  # type: ignore[arg-type, return-value]
        limits=config(**{"max_turns": 4, "step_timeout_s": 2.0, **limits}),
        rubric=rubric,
        generate=policy,
        scripted=policy,
        decode=lambda tokens: "".join(map(chr, tokens)),
        seed=0,
        max_block_s=max_block_s,
    )
    return asyncio.run(checker.check(Problem(problem_id="p", data={}), is_first=False))


class Saved(CountingEnv):
    """Can be resumed from its state, which it restores whole."""

    async def state_dict(self) -> Any:
        return {"prompt": list(self.prompt), "calls": self.calls}

    async def load_state_dict(self, state: Any) -> None:
        self.prompt, self.calls = tuple(state["prompt"]), list(state["calls"])


class Replayed(CountingEnv):
    replays = True


class FromLimits(CountingEnv):
    """Needs more turns than the limits allow, and then ends."""

    def __init__(self) -> None:
        super().__init__(turns=9)


SOUND = [CountingEnv, Saved, Replayed, FromLimits]


class NeverEnds(CountingEnv):
    async def step(self, completion: Completion) -> Observation | Terminal:
        self.prompt = (*self.prompt, *completion.token_ids, 0)
        return Observation(prompt_token_ids=self.prompt)


class AsksAgain(NeverEnds):
    """The script's answers are no actions of this game."""

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0, metrics={"invalid_actions": self.prompt.count(0)})


class NotFinite(CountingEnv):
    def __init__(self) -> None:
        super().__init__(reward=math.nan)


class NotFiniteTurn(CountingEnv):
    async def step(self, completion: Completion) -> Observation | Terminal:
        return Terminal(reward=1.0, turn_reward=math.inf)


class NoReward(CountingEnv):
    def __init__(self) -> None:
        super().__init__(reward=None)


class Rerendered(CountingEnv):
    """Leaves the policy's stop token out of the history."""

    async def step(self, completion: Completion) -> Observation | Terminal:
        answer = await super().step(completion)
        if isinstance(answer, Observation):
            self.prompt = (*self.prompt[:2], *completion.token_ids[:-1], 0)
            return Observation(prompt_token_ids=self.prompt)
        return answer


class Blocking(CountingEnv):
    async def step(self, completion: Completion) -> Observation | Terminal:
        time.sleep(BLOCKS_S)
        return await super().step(completion)


class Computing(CountingEnv):
    def __init__(self) -> None:
        super().__init__(turns=1)

    async def step(self, completion: Completion) -> Observation | Terminal:
        end_s = time.thread_time() + COMPUTES_S
        while time.thread_time() < end_s:
            pass
        return await super().step(completion)


class Waiting(CountingEnv):
    """Takes long, and gives way meanwhile."""

    def __init__(self) -> None:
        super().__init__(turns=1)

    async def step(self, completion: Completion) -> Observation | Terminal:
        await asyncio.sleep(WAITS_S)
        return await super().step(completion)


class Forgets(Saved):
    async def load_state_dict(self, state: Any) -> None:
        """The number of steps is lost."""
        self.prompt = tuple(state["prompt"])


class NotJson(Saved):
    async def state_dict(self) -> Any:
        return {"prompt": self}


class ReplaysByChance(CountingEnv):
    replays = True
    number = 0

    async def reset(self) -> Observation:
        type(self).number += 1
        self.prompt = (1, self.number)
        return await super().reset()


class RaisesInReset(CountingEnv):
    async def reset(self) -> Observation:
        raise RuntimeError("no server")


class RaisesInStep(CountingEnv):
    async def step(self, completion: Completion) -> Observation | Terminal:
        raise KeyError("answer")


class RaisesInClose(CountingEnv):
    async def close(self) -> None:
        raise OSError("gone")


class Plain(CountingEnv):
    def reset(self) -> Observation:  # type: ignore[override]
        return Observation(prompt_token_ids=(1,))


class LongPrompt(CountingEnv):
    async def reset(self) -> Observation:
        return Observation(prompt_token_ids=tuple(range(700)))


class OutsideTheVocabulary(CountingEnv):
    async def reset(self) -> Observation:
        return Observation(prompt_token_ids=(1, VOCAB_SIZE))


class StopsOutsideTheVocabulary(CountingEnv):
    async def reset(self) -> Observation:
        return Observation(prompt_token_ids=(1,), stop_token_ids=(VOCAB_SIZE,))


class Hangs(CountingEnv):
    async def step(self, completion: Completion) -> Observation | Terminal:
        await asyncio.Event().wait()
        raise AssertionError


MISTAKES = [
    (NeverEnds, Mistake.NEVER_ENDS, "64 turns, and no end"),
    (NotFinite, Mistake.REWARD, "the reward is nan"),
    (NotFiniteTurn, Mistake.REWARD, "the reward of turn 1 is inf"),
    (NoReward, Mistake.REWARD, "neither the environment nor a rubric gave a reward"),
    (Rerendered, Mistake.HISTORY, r"at token 4 it has '\x00' where the policy saw '\x03'"),
    (Blocking, Mistake.BLOCKING, "step blocks the event loop for"),
    (Forgets, Mistake.STATE, "continued after 1 turns: turn 2 is answered by Observation"),
    (NotJson, Mistake.STATE, "state_dict: TypeError: Object of type NotJson is not JSON"),
    (ReplaysByChance, Mistake.STATE, "has another prompt in turn"),
    (RaisesInReset, Mistake.EXCEPTION, "reset: RuntimeError: no server"),
    (RaisesInStep, Mistake.EXCEPTION, "step: KeyError: 'answer'"),
    (RaisesInClose, Mistake.EXCEPTION, "close: OSError: gone"),
    (Plain, Mistake.EXCEPTION, "Plain.reset must be an async method; wrap plain ones"),
    (LongPrompt, Mistake.PROMPT_LENGTH, "700 tokens leaves no room in rollout.max_total_tokens"),
    (OutsideTheVocabulary, Mistake.GENERATION, "holds 1000, outside the vocabulary 0..999"),
    (StopsOutsideTheVocabulary, Mistake.GENERATION, "use ids inside the vocabulary 0..999"),
    (Hangs, Mistake.TIMEOUT, "step: no answer after 0.3 s"),
]


@pytest.mark.parametrize(("env", "mistake", "what"), MISTAKES)
def test_each_mistake_is_found_and_has_a_mend(env: type, mistake: Mistake, what: str) -> None:
    options = {Hangs: {"step_timeout_s": 0.3}, Blocking: {"max_block_s": MAX_BLOCK_S}}
    findings = check(env, **options.get(env, {})).findings
    assert {finding.mistake for finding in findings} == {mistake}
    assert what in findings[0].what
    assert findings[0].mend
    assert findings[0].rollout_id == "check/p/r0"


@pytest.mark.parametrize("env", SOUND)
def test_nothing_is_found_in_a_sound_environment(env: type) -> None:
    assert check(env).findings == []


class EndlessAndBlocking(NeverEnds):
    async def step(self, completion: Completion) -> Observation | Terminal:
        time.sleep(BLOCKS_S)
        return await super().step(completion)


class EndlessAndRerendered(NeverEnds):
    async def step(self, completion: Completion) -> Observation | Terminal:
        self.prompt = (*self.prompt[:2], *completion.token_ids[:-1], 0)
        return Observation(prompt_token_ids=self.prompt)


class ForgetsAndBlocks(Forgets):
    async def step(self, completion: Completion) -> Observation | Terminal:
        time.sleep(BLOCKS_S)
        return await super().step(completion)


class SavedNotFinite(Saved):
    def __init__(self) -> None:
        super().__init__(reward=math.nan)


@pytest.mark.parametrize(
    ("env", "mistakes"),
    [
        (EndlessAndBlocking, {Mistake.BLOCKING, Mistake.NEVER_ENDS}),
        (EndlessAndRerendered, {Mistake.HISTORY, Mistake.NEVER_ENDS}),
        (ForgetsAndBlocks, {Mistake.BLOCKING, Mistake.STATE}),
        (SavedNotFinite, {Mistake.REWARD}),
    ],
)
def test_one_mistake_does_not_hide_another(env: type, mistakes: set[Mistake]) -> None:
    """Else ``--allow`` of the one would accept the other."""
    blocking = {"max_block_s": MAX_BLOCK_S} if Mistake.BLOCKING in mistakes else {}
    findings = check(env, **blocking).findings
    assert {finding.mistake for finding in findings} == mistakes


def test_a_script_without_actions_leaves_open_whether_a_game_ends() -> None:
    checked = check(AsksAgain)
    assert checked.findings == []
    assert "none of its answers was an action; --say some that" in checked.unclear


def test_answers_that_were_cut_are_no_mistake_of_the_environment() -> None:
    checked = check(Rerendered, max_tokens_per_turn=2)
    assert checked.findings == []
    assert checked.notes[0].startswith("check/p/r0: 1 of 2 answers were cut, the first one after 2")
    checked = check(NeverEnds, max_tokens_per_turn=1)
    assert checked.findings == []
    assert "all of its answers were cut by the length limit" in checked.unclear


def test_an_environment_that_waits_does_not_block() -> None:
    assert check(Waiting, max_block_s=MAX_WHILE_WAITING_S).findings == []


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count waits"
)
def test_an_environment_that_waits_for_a_busy_core_does_not_block() -> None:
    core = min(os.sched_getaffinity(0))
    keep_busy = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    )
    command = [sys.executable, "-c", keep_busy]

    def check_on_a_busy_core() -> CheckedProblem:
        os.sched_setaffinity(0, {core})  # of this thread alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        return check(Computing, max_block_s=MAX_WHILE_COMPUTING_S)

    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with ThreadPoolExecutor(1) as pool:
            findings = pool.submit(check_on_a_busy_core).result().findings
        other.kill()
    assert findings == []


def test_a_wait_for_a_core_between_the_two_clocks_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s, waited_s = iter([3.0]), 0.0

    def perf_counter() -> float:
        nonlocal waited_s
        waited_s += next(waits_s, 0.0)  # the thread is preempted after the first clock was read
        return waited_s

    scheduling = SimpleNamespace(read_text=lambda: f"0 {waited_s * 1e9:.0f} 1")
    monkeypatch.setattr(env_check, "_SCHEDULING", scheduling)
    monkeypatch.setattr(env_check, "time", SimpleNamespace(perf_counter=perf_counter))
    assert env_check._own_time_s() == 0.0


def test_threads_may_block() -> None:
    class Slow:
        def reset(self) -> Observation:
            time.sleep(WAITS_S)
            return Observation(prompt_token_ids=(1,))

        def step(self, completion: Completion) -> Terminal:
            return Terminal(reward=1.0)

        def finish(self, status: object) -> Terminal:
            return Terminal(reward=0.0)

        def close(self) -> None: ...

    checked = check(lambda: threaded(Slow()), max_block_s=MAX_WHILE_WAITING_S)  # type: ignore[arg-type]
    assert checked.findings == []


def test_a_rollout_is_shown_turn_by_turn() -> None:
    checked = check(CountingEnv)
    lines = describe_rollout(checked.rollout, checked.watched, lambda tokens: str(list(tokens)))
    text = "\n".join(lines)
    assert lines[0] == "=== check/p/r0: completed, reward 1, 2 turns, 1 episode"
    assert "turn 1: prompt 2 tokens, completion 3 (stop), step " in text
    assert "turn 2: prompt 6 tokens (1 new), completion 2 (stop), step " in text
    assert "policy>\n    [97, 98, 3]" in text
    assert "metrics: steps 2" in text
