"""Groups of rollouts: concurrency, limits, endings, scoring."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.fast.rollouts import PROBLEM, CountingEnv, Factory, ScriptedGenerate, complete, config
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.rollout_run import Phase
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score
from torchtitan_rl.types import FinishReason, RolloutStatus

SCRIPT = [(11, 12), (13,), (14, 15), (16,), (17,)]


def run(factory, *, generate=None, rubric=None, size=1, on_rollout=None, **limits):
    rollouter = Rollouter(
        generate=generate or ScriptedGenerate(SCRIPT),
        environment=factory,
        config=config(**limits),
        rubric=rubric,
    )
    group = rollouter.run_group("g", PROBLEM, size=size, seed=7, on_rollout=on_rollout)
    result = asyncio.run(group)
    assert rollouter.activities() == []
    return result.rollouts


def only(*args, **kwargs):
    (rollout,) = run(*args, **kwargs)
    return rollout


def closes(factory) -> list[int]:
    return [env.calls.count("close") for env in factory.made]


def test_a_rollout_alternates_prompts_and_completions_until_the_environment_ends_it():
    rollout = only(Factory(CountingEnv))
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.reward == 1.0
    assert [turn.prompt_token_ids for turn in rollout.turns] == [(1, 2), (1, 2, 11, 12, 0)]
    assert [turn.completion.token_ids for turn in rollout.turns] == [(11, 12), (13,)]
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.5]
    assert rollout.turns[0].text == "turn"
    assert rollout.metrics == {"steps": 2}
    assert (rollout.rollout_id, rollout.group_id, rollout.problem_id) == ("g/r0", "g", "p")


def test_each_turn_is_a_request_of_its_own_in_the_rollouts_session():
    generate = ScriptedGenerate(SCRIPT)
    run(Factory(CountingEnv), generate=generate, size=2)
    ids = sorted((request.request_id, request.session_id) for request in generate.requests)
    assert ids == [
        ("g/r0/t0", "g/r0"),
        ("g/r0/t1", "g/r0"),
        ("g/r1/t0", "g/r1"),
        ("g/r1/t1", "g/r1"),
    ]
    assert {request.sampling.temperature for request in generate.requests} == {0.7}
    assert len({request.sampling.seed for request in generate.requests}) == 4


def test_two_runs_with_one_seed_ask_for_the_same():
    first, second = ScriptedGenerate(SCRIPT), ScriptedGenerate(SCRIPT)
    run(Factory(CountingEnv), generate=first, size=3)
    run(Factory(CountingEnv), generate=second, size=3)
    assert sorted(map(repr, first.requests)) == sorted(map(repr, second.requests))


def test_validation_may_sample_at_another_temperature():
    generate = ScriptedGenerate(SCRIPT)
    rollouter = Rollouter(generate=generate, environment=Factory(CountingEnv), config=config())
    asyncio.run(rollouter.run_group("g", PROBLEM, size=1, seed=0, temperature=0.0))
    assert {request.sampling.temperature for request in generate.requests} == {0.0}


def test_siblings_run_concurrently():
    """Each waits in its first turn until all have arrived there."""
    arrived = []
    everybody = asyncio.Event()

    async def wait_for_siblings():
        arrived.append(1)
        if len(arrived) == 5:
            everybody.set()
        await everybody.wait()
        return (11,)

    generate = ScriptedGenerate([lambda _: wait_for_siblings(), *SCRIPT[1:]])
    assert len(run(Factory(CountingEnv), generate=generate, size=5)) == 5


def test_blocking_environments_block_only_their_own_rollout():
    """Plain methods meet at a barrier, which a single thread could never pass."""
    barrier = threading.Barrier(40)

    class Blocking(CountingEnv):
        def reset(self):
            barrier.wait(timeout=60)
            return Observation(prompt_token_ids=(1,))

        def close(self):
            self.calls.append("close")

    factory = Factory(Blocking)
    rollouts = run(factory, size=40)
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.COMPLETED}
    assert closes(factory) == [1] * 40


def test_the_turn_limit_ends_a_rollout_with_what_it_is_worth_so_far():
    factory = Factory(lambda: CountingEnv(turns=9))
    rollout = only(factory, max_turns=3)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert len(rollout.turns) == 3
    assert rollout.reward == 0.125
    assert factory.made[0].calls == ["reset", *["step"] * 3, "finish max_turns", "close"]


def test_no_room_for_another_turn_ends_a_rollout_as_max_tokens():
    rollout = only(Factory(lambda: CountingEnv(turns=9)), max_total_tokens=7, max_turns=9)
    assert rollout.status is RolloutStatus.MAX_TOKENS
    # prompts of 2, 5, 7 tokens: the third has no room left
    assert [len(turn.prompt_token_ids) for turn in rollout.turns] == [2, 5]


def test_a_first_prompt_without_room_gives_a_rollout_without_turns():
    rollout = only(Factory(CountingEnv), max_total_tokens=2)
    assert (rollout.status, rollout.turns, rollout.reward) == (RolloutStatus.MAX_TOKENS, (), 0.125)


def test_the_budget_is_the_smallest_of_turn_room_and_the_environments_wish():
    class Wish(CountingEnv):
        async def reset(self):
            return Observation(prompt_token_ids=(1, 2), max_tokens=self.wish)

    def budget(wish, **limits):
        generate = ScriptedGenerate(SCRIPT)
        Wish.wish = wish
        run(Factory(lambda: Wish(turns=1)), generate=generate, **limits)
        return generate.requests[0].sampling.max_tokens

    assert budget(None, max_tokens_per_turn=6) == 6
    assert budget(None, max_tokens_per_turn=6, max_total_tokens=5) == 3
    assert budget(2, max_tokens_per_turn=6, max_total_tokens=5) == 2


def test_a_completion_cut_at_its_budget_is_stepped_with_and_may_complete():
    factory = Factory(lambda: CountingEnv(turns=1))
    rollout = only(factory, max_tokens_per_turn=1)
    assert rollout.turns[0].completion.finish_reason is FinishReason.LENGTH
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)


def test_a_completion_cut_for_want_of_room_ends_as_max_tokens_when_the_env_goes_on():
    factory = Factory(lambda: CountingEnv(turns=2))
    rollout = only(factory, max_total_tokens=3)
    assert rollout.status is RolloutStatus.MAX_TOKENS
    assert factory.made[0].calls == ["reset", "step", "finish max_tokens", "close"]


def test_trap_9_an_empty_completion_is_stepped_with():
    rollout = only(Factory(CountingEnv), generate=ScriptedGenerate([(), (13,)]))
    assert rollout.status is RolloutStatus.COMPLETED
    assert [turn.completion.token_ids for turn in rollout.turns] == [(), (13,)]


class Hanging(CountingEnv):
    async def step(self, completion):
        self.calls.append("step")
        await asyncio.Event().wait()


def test_an_environment_that_hangs_ends_by_step_timeout_and_is_closed():
    factory = Factory(Hanging)
    rollout = only(factory, step_timeout_s=0.02)
    assert (rollout.status, rollout.reward) == (RolloutStatus.STEP_TIMEOUT, None)
    assert "step: no answer after 0.02 s" in rollout.cause
    assert factory.made[0].calls == ["reset", "step", "close"]
    assert len(rollout.turns) == 1  # what was sampled before is kept


def test_a_thread_that_hangs_does_not_keep_the_rollout():
    release = threading.Event()

    class Stuck(CountingEnv):
        def step(self, completion):
            release.wait()

    factory = Factory(Stuck)
    rollout = only(factory, step_timeout_s=0.02)
    release.set()
    assert rollout.status is RolloutStatus.STEP_TIMEOUT
    assert closes(factory) == [1]


def test_a_close_that_hangs_is_given_up_and_said():
    class NeverCloses(CountingEnv):
        async def close(self):
            await asyncio.Event().wait()

    rollout = only(Factory(NeverCloses), step_timeout_s=0.02)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert "close: no answer" in rollout.cause


def test_the_rollouts_time_interrupts_generation_and_asks_what_it_is_worth():
    generate = ScriptedGenerate([(11,), lambda _: asyncio.Event().wait()])
    factory = Factory(CountingEnv)
    rollout = only(factory, generate=generate, rollout_timeout_s=0.05)
    assert (rollout.status, rollout.reward) == (RolloutStatus.ROLLOUT_TIMEOUT, 0.125)
    assert len(rollout.turns) == 1
    assert factory.made[0].calls[-2:] == ["finish rollout_timeout", "close"]


def test_an_environments_own_time_error_is_not_taken_for_a_limit():
    class Raises(CountingEnv):
        async def step(self, completion):
            raise TimeoutError("the database")

    rollout = only(Factory(Raises))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "step: TimeoutError: the database (test_rollout_rollouter.py:" in rollout.cause


def raising(method: str, error: BaseException):
    class Broken(CountingEnv):
        pass

    def fail(self, *args):
        raise error

    async def fail_async(self, *args):
        raise error

    setattr(Broken, method, fail if method == "finish" else fail_async)
    return lambda: Broken(turns=9)


@pytest.mark.parametrize("method", ["reset", "step", "finish"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), asyncio.CancelledError()])
def test_trap_18_an_environment_that_raises_ends_alone_with_a_cause(method, error):
    factory = Factory(raising(method, error), CountingEnv)
    broken, sound = run(factory, size=2, max_turns=2)
    assert (broken.status, broken.reward) == (RolloutStatus.ENV_ERROR, None)
    assert method in broken.cause or "fail" in broken.cause
    assert type(error).__name__ in broken.cause
    assert (sound.status, sound.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert closes(factory) == [1, 1]


def test_an_environment_that_cannot_be_made_is_an_env_error():
    def explode():
        raise OSError("no disk")

    rollout = only(Factory(explode))
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "creation: OSError: no disk" in rollout.cause


@pytest.mark.parametrize("answer", [None, (1, 2), Observation(prompt_token_ids=())])
def test_an_answer_of_the_wrong_kind_is_an_env_error(answer):
    class Wrong(CountingEnv):
        async def step(self, completion):
            return answer

    factory = Factory(Wrong)
    assert only(factory).status is RolloutStatus.ENV_ERROR
    assert closes(factory) == [1]


@pytest.mark.parametrize(
    "failure",
    [
        ReplicaError("replica 1 died"),
        RuntimeError("bug"),
        asyncio.CancelledError(),
        lambda request: complete(request, (1,), FinishReason.ABORT),
    ],
)
def test_a_request_that_fails_ends_its_rollout_only(failure):
    def second_fails(request):
        if not request.request_id.startswith("g/r1/"):
            return (13,)
        if isinstance(failure, BaseException):
            raise failure
        return failure(request)

    factory = Factory(CountingEnv)
    rollouts = run(factory, generate=ScriptedGenerate([(11,), second_fails]), size=3)
    assert [rollout.status.value for rollout in rollouts] == [
        "completed",
        "generation_error",
        "completed",
    ]
    assert "g/r1/t1" in rollouts[1].cause
    assert rollouts[1].turns[0].completion.token_ids == (11,)
    assert closes(factory) == [1, 1, 1]


def test_misaligned_logprobs_never_reach_an_episode():
    def misaligned(request):
        good = complete(request, (1, 2))
        return type(good)(
            request_id=good.request_id,
            token_ids=(1, 2),
            logprobs=(-1.0,),
            version_runs=good.version_runs,
            finish_reason=FinishReason.STOP,
        )

    rollout = only(Factory(CountingEnv), generate=ScriptedGenerate([misaligned]))
    assert rollout.status is RolloutStatus.GENERATION_ERROR
    assert "lengths (2, 1, 2)" in rollout.cause


def test_a_cancelled_group_closes_every_environment_and_reports_each_rollout_once():
    reported = []

    async def scenario(factory, turns_before):
        generate = ScriptedGenerate(
            [*SCRIPT[:turns_before], lambda _: asyncio.Event().wait(), *SCRIPT]
        )
        rollouter = Rollouter(
            generate=generate,
            environment=factory,
            config=config(),
            rubric=Rubric([RewardFunction(name="one", function=lambda r, p: 1.0)]),
        )
        task = asyncio.create_task(
            rollouter.run_group("g", PROBLEM, size=3, seed=0, on_rollout=reported.append)
        )
        for _ in range(30):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rollouter.activities() == []

    for turns_before in (0, 1):
        factory = Factory(CountingEnv)
        reported.clear()
        asyncio.run(scenario(factory, turns_before))
        assert closes(factory) == [1, 1, 1]
        assert sorted(rollout.rollout_id for rollout in reported) == ["g/r0", "g/r1", "g/r2"]
        assert {rollout.status for rollout in reported} == {RolloutStatus.CANCELLED}
        assert {len(rollout.turns) for rollout in reported} == {turns_before}


def test_a_group_cancelled_before_it_began_still_reports_its_rollouts():
    reported = []

    async def scenario():
        rollouter = Rollouter(
            generate=ScriptedGenerate(SCRIPT), environment=Factory(CountingEnv), config=config()
        )
        group = rollouter.run_group("g", PROBLEM, size=2, seed=0, on_rollout=reported.append)
        task = asyncio.create_task(group)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert [rollout.status for rollout in reported] == [RolloutStatus.CANCELLED] * 2


def test_closing_goes_to_its_end_even_when_cancelled_twice():
    done = []

    class Slow(CountingEnv):
        async def close(self):
            await asyncio.sleep(0.02)
            done.append(1)

    async def scenario():
        rollouter = Rollouter(
            generate=ScriptedGenerate(SCRIPT), environment=Factory(Slow), config=config()
        )
        task = asyncio.create_task(rollouter.run_group("g", PROBLEM, size=1, seed=0))
        while not rollouter.activities() or rollouter.activities()[0].detail != "close":
            await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert done == [1]


def test_a_rollout_is_reported_as_soon_as_it_ends_not_when_its_group_does():
    """r1 may only go on after r0 has been reported."""
    first_reported = asyncio.Event()

    async def after_the_first():
        await first_reported.wait()
        return (11,)

    def entry(request):
        return after_the_first() if request.session_id == "g/r1" else (11,)

    reported = []

    def on_rollout(rollout):
        reported.append((rollout.rollout_id, rollout.reward))
        first_reported.set()

    rubric = Rubric([RewardFunction(name="length", function=lambda r, p: len(r.turns))])
    factory = Factory(CountingEnv)
    generate = ScriptedGenerate([entry, (13,)])
    run(factory, generate=generate, size=2, rubric=rubric, on_rollout=on_rollout)
    assert reported == [("g/r0", 2.0), ("g/r1", 2.0)]


def test_a_rubric_that_scores_groups_sees_all_siblings_that_did_not_fail():
    class Ranks(Rubric):
        async def score_group(self, rollouts, problem):
            return [Score(reward=float(i), components={"rank": i}) for i in range(len(rollouts))]

    reported = []
    factory = Factory(CountingEnv, raising("step", ValueError("no")), CountingEnv)
    rollouts = run(factory, size=3, rubric=Ranks([]), on_rollout=reported.append)
    assert [rollout.reward for rollout in rollouts] == [0.0, None, 1.0]
    assert rollouts[2].metrics["reward/rank"] == 1
    assert reported == list(rollouts)


@pytest.mark.parametrize("kind", ["raises", "too few", "hangs"])
def test_group_scoring_that_fails_is_a_reward_error_of_each_sibling(kind):
    class Broken(Rubric):
        async def score_group(self, rollouts, problem):
            if kind == "raises":
                raise KeyError("k")
            if kind == "hangs":
                await asyncio.Event().wait()
            return []

    rollouts = run(Factory(CountingEnv), size=2, rubric=Broken([], timeout_s=0.02))
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.REWARD_ERROR}
    assert all("score_group" in rollout.cause for rollout in rollouts)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_without_a_rubric_an_environment_that_gives_no_finite_reward_is_a_reward_error(reward):
    rollout = only(Factory(lambda: CountingEnv(reward=reward)))
    assert (rollout.status, rollout.reward) == (RolloutStatus.REWARD_ERROR, None)
    assert rollout.cause


def test_failed_rollouts_are_not_scored():
    def never(rollout, problem):
        raise AssertionError("scored")

    rubric = Rubric([RewardFunction(name="never", function=never)])
    rollout = only(Factory(raising("step", ValueError("no"))), rubric=rubric)
    assert rollout.status is RolloutStatus.ENV_ERROR


def test_a_prompt_may_be_given_as_a_list():
    class Lists(CountingEnv):
        async def reset(self):
            return Observation(prompt_token_ids=[1, 2])

    generate = ScriptedGenerate(SCRIPT)
    rollout = only(Factory(Lists), generate=generate)
    assert rollout.turns[0].prompt_token_ids == (1, 2)
    assert generate.requests[0].prompt_token_ids == (1, 2)


def test_an_environment_may_end_its_rollout_with_a_failure_of_its_own():
    class GivesUp(CountingEnv):
        async def step(self, completion):
            return Terminal(reward=3.0, status=RolloutStatus.ENV_ERROR)

    rollout = only(Factory(GivesUp))
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_ERROR, None)


def test_activities_name_what_each_rollout_waits_for():
    async def scenario():
        generate = ScriptedGenerate([(11,), lambda _: asyncio.Event().wait()])
        rollouter = Rollouter(
            generate=generate, environment=Factory(CountingEnv, Hanging), config=config()
        )
        task = asyncio.create_task(rollouter.run_group("g", PROBLEM, size=2, seed=0))
        for _ in range(30):
            await asyncio.sleep(0)
        seen = [(a.rollout_id, a.turn, a.phase, a.detail) for a in rollouter.activities()]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(scenario()) == [
        ("g/r0", 1, Phase.GENERATION, "g/r0/t1"),
        ("g/r1", 1, Phase.ENVIRONMENT, "step"),
    ]
