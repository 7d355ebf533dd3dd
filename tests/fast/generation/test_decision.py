"""The pure parts below the engine loop: decisions, inbox, versions, validation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.generation.commands import Pause, Pull
from torchtitan_rl.generation.decision import (
    Action,
    Inbox,
    KvPolicy,
    LoopDecision,
    kv_policy_errors,
    num_fitting,
)
from torchtitan_rl.generation.engine import EngineLimits, validate_request
from torchtitan_rl.types import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    VersionRun,
    add_run,
    runs_before,
)

LIMITS = EngineLimits(max_model_len=32, vocab_size=100)
POLICY = KvPolicy()


def asked(name: str, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return GenerationRequest(request_id=name, prompt_token_ids=(1, 2), sampling=params)


def stats(*, kv_tokens: int = 0, kv_use: float = 0.0, waiting: int = 0) -> EngineStats:
    return EngineStats(
        version=0,
        running=1,
        waiting=waiting,
        kv_use=kv_use,
        kv_tokens=kv_tokens,
        preemptions=0,
        generated_tokens=0,
        tokens_per_second=0.0,
        steps=0,
    )


def take(inbox: Inbox, *, is_idle: bool = False, **cache: float) -> LoopDecision:
    return inbox.next_decision(
        is_idle=is_idle, sleep_s=None, max_steps=4, kv_policy=POLICY, stats=stats(**cache)
    )


@given(st.lists(st.sampled_from(["admit", "abort", "pull", "take"]), max_size=40))
def test_what_is_put_in_an_inbox_leaves_exactly_once_and_in_order(actions: list[str]) -> None:
    inbox, decisions = Inbox(), []
    expected: dict[str, list] = {"admit": [], "abort": []}
    waiting_pull, futures = None, []
    for put, action in enumerate(actions):
        if action == "admit":
            inbox.admit(asked(str(put)))
            expected["admit"].append(str(put))
        elif action == "abort":
            inbox.abort((str(put),))
            expected["abort"].append(str(put))
        elif action == "pull":
            futures.append(inbox.ask(Pull(put)))
            waiting_pull = put
        else:
            decision = take(inbox)
            inbox.answer(put)
            assert all(future.done() for future in futures)
            decisions.append(decision)
            assert (decision.action is Action.PULL) == (waiting_pull is not None)
            if waiting_pull is not None:
                assert decision.version == waiting_pull
                waiting_pull = None
    assert inbox.drain() == [future for future in futures if not future.done()]
    decisions.append(take(inbox))
    assert [one.request_id for d in decisions for one in d.admissions] == expected["admit"]
    assert [name for d in decisions for name in d.aborts] == expected["abort"]
    assert not inbox.needs_decision()


def test_close_goes_before_a_pull_and_a_pull_before_admissions() -> None:
    inbox = Inbox()
    inbox.admit(asked("a"))
    inbox.ask(Pull(3))
    assert take(inbox).action is Action.PULL
    assert take(inbox).admissions == (asked("a"),)
    inbox.ask(Pull(4))
    inbox.close()
    assert take(inbox).action is Action.CLOSE


def test_a_pull_steps_at_once_but_not_while_paused() -> None:
    inbox = Inbox()
    inbox.ask(Pull(3))
    assert take(inbox).num_steps == 1
    inbox.ask(Pause("keep"))
    assert take(inbox).action is Action.PAUSE
    inbox.ask(Pull(4))
    paused = take(inbox)
    assert (paused.action, paused.num_steps) == (Action.PULL, 0)


@pytest.mark.parametrize(
    ("prompts", "cache", "number"),
    [
        ([10] * 9, {"kv_tokens": 0, "kv_use": 1.0}, 9),  # an unknown size
        ([10] * 9, {"kv_tokens": 100}, 9),
        ([10] * 9, {"kv_tokens": 100, "kv_use": 0.5}, 4),  # 5 would use the whole cache
        ([10] * 9, {"kv_tokens": 100, "kv_use": 0.9}, 0),
        ([10] * 9, {"kv_tokens": 100, "kv_use": 0.5, "waiting": 3}, 1),
        ([30, 1, 1], {"kv_tokens": 100, "kv_use": 0.7}, 0),  # the small ones do not overtake
        ([], {"kv_tokens": 100}, 0),
    ],
)
def test_part_of_the_cache_stays_free_for_running_requests(
    prompts: list[int], cache: dict[str, float], number: int
) -> None:
    assert num_fitting(prompts, stats(**cache), is_idle=False) == number


def test_an_idle_engine_starts_a_prompt_that_fills_its_cache() -> None:
    inbox = Inbox()
    inbox.admit(asked("large"))
    inbox.admit(asked("next"))
    assert take(inbox, is_idle=True, kv_tokens=2).admissions == (asked("large"),)
    assert take(inbox, kv_tokens=2, kv_use=1.0).admissions == ()
    assert take(inbox, is_idle=True, kv_tokens=2).admissions == (asked("next"),)
    assert not inbox.needs_decision()


def test_an_abort_reaches_a_request_that_waits_for_room() -> None:
    inbox = Inbox()
    for name in "abc":
        inbox.admit(asked(name))
    inbox.abort(("b",))
    full = take(inbox, kv_tokens=8, kv_use=1.0)
    assert (full.admissions, full.aborts) == ((asked("b"),), ("b",))
    assert take(inbox, kv_tokens=8, kv_use=0.5).admissions == (asked("a"),)
    assert take(inbox, kv_tokens=8).admissions == (asked("c"),)


@given(st.lists(st.sampled_from(["token", "pull"]), max_size=60))
def test_versions_are_those_that_each_token_was_sampled_under(events: list[str]) -> None:
    runs, version, sampled = (VersionRun(0, 0),), 0, []
    for event in events:
        if event == "token":
            sampled.append(version)
        else:
            version += 1
            runs = add_run(runs, length=len(sampled), version=version)
    runs = runs_before(runs, len(sampled))
    completion = Completion(
        request_id="a",
        token_ids=(0,) * len(sampled),
        logprobs=(0.0,) * len(sampled),
        version_runs=runs,
        finish_reason=FinishReason.LENGTH,
    )
    assert list(completion.versions) == sampled
    assert len(runs) == len(set(sampled))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": (1, 100)}, "holds 100, outside the vocabulary"),
        ({"prompt_token_ids": (-1, 5)}, "holds -1, outside the vocabulary"),
        ({"prompt_token_ids": (1,) * 32}, "leaves no room in max_model_len = 32"),
        ({"prompt_token_ids": (1,) * 29}, "set it to at most 3"),
        ({"max_tokens": 0}, "max_tokens = 0: set it to at least 1"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": 0.001}, "temperature = 0.001"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 2.5}, "temperature = 2.5"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"min_p": -0.1}, "min_p = -0.1"),
        ({"top_k": -2}, "top_k = -2"),
        ({"min_tokens": 5}, "min_tokens = 5"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"seed": -(2**63)}, "seed = -9223372036854775808"),
        ({"request_id": "taken"}, "still outstanding"),
        ({"request_id": ""}, "request_id is empty"),
        ({"stop": ("a", "")}, "not empty"),
        ({"stop": "abc"}, "use a tuple"),
        ({"num_logprobs": 21}, "from 0 to 20"),
        ({"num_logprobs": 1, "with_logprobs": False}, "without with_logprobs"),
        ({"engine_options": {"logit_bias": {5: object()}}}, "cannot be written as JSON"),
        ({"engine_options": {"presence_penalty": float("nan")}}, "cannot be written as JSON"),
        ({"engine_options": {5: 1}}, "mapping from names"),
        ({"num_resumed": 2}, "num_resumed = 2 of 2"),
        ({"num_resumed": -1}, "num_resumed = -1 of 2"),
        ({"routed_from": 2}, "routed_from = 2 of 2"),
        ({"routed_from": -1}, "routed_from = -1 of 2"),
    ],
)
def test_a_request_the_engine_could_not_serve_is_refused(changes: dict, message: str) -> None:
    options = {"logit_bias": {"5": 1.5}, "structured_outputs": {"json": {"type": "object"}}}
    request = asked("a", stop=("ab",), num_logprobs=20, engine_options=options)
    validate_request(replace(request, num_resumed=1, routed_from=1), LIMITS, {"taken"})
    own = {name: value for name, value in changes.items() if hasattr(request, name)}
    sampling = {name: value for name, value in changes.items() if name not in own}
    bad = replace(request, **own, sampling=replace(request.sampling, **sampling))
    with pytest.raises(InvalidRequestError, match=message):
        validate_request(bad, LIMITS, {"taken"})


def test_every_error_of_a_request_is_named_at_once() -> None:
    bad = asked("a", temperature=-1.0, top_p=2.0)
    with pytest.raises(InvalidRequestError, match=r"temperature = -1.0.*top_p = 2.0"):
        validate_request(bad, LIMITS, ())


def test_recomputing_and_drain_require_the_cache_reset() -> None:
    (error,) = kv_policy_errors(resets=False, recomputes=True)
    assert "recompute_running_on_pull" in error
    kept = partial(kv_policy_errors, resets=False, recomputes=False)
    assert kept() == []
    assert len(kept(drains=True)) == 1
    assert kept(resets=True, drains=True) == []
