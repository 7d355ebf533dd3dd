"""What requests may ask for beyond a temperature, and the scripted engine that obeys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.scripted import ScriptedEngine, scripted_text
from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.generation.engine import Admission, EngineLimits, EngineOutput
from torchtitan_rl.generation.validation import validate_request
from torchtitan_rl.types import FinishReason, GenerationRequest, SamplingParams

LIMITS = EngineLimits(max_model_len=64, vocab_size=100)


def request(num_resumed: int = 0, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="a",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(**{"max_tokens": 30, **sampling}),
        num_resumed=num_resumed,
    )


def engine_with(*requests: GenerationRequest) -> ScriptedEngine:
    engine = ScriptedEngine()
    for one in requests:
        engine.add_request(Admission(request=one, arrival_s=0.0))
    return engine


def finish(engine: ScriptedEngine) -> EngineOutput:
    while not (outputs := engine.step()):
        pass
    return outputs[0]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop": ("a", "")}, "not empty"),
        ({"stop": "abc"}, "use a tuple"),
        ({"stop": (5,)}, "use a tuple"),
        ({"num_logprobs": -1}, "num_logprobs = -1"),
        ({"num_logprobs": 21}, "from 0 to 20"),
        ({"num_logprobs": 1, "with_logprobs": False}, "without with_logprobs"),
        ({"engine_options": {"logit_bias": {5: object()}}}, "cannot be written as JSON"),
        ({"engine_options": {"presence_penalty": float("nan")}}, "cannot be written as JSON"),
        ({"engine_options": {5: 1}}, "mapping from names"),
        ({"engine_options": ["presence_penalty"]}, "mapping from names"),
        ({"num_resumed": 3}, "num_resumed = 3 of 3"),
        ({"num_resumed": -1}, "num_resumed = -1 of 3"),
    ],
)
def test_sampling_that_no_engine_could_serve_is_refused(
    sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate_request(request(**sampling), LIMITS, ())


def test_stop_strings_alternatives_and_options_pass() -> None:
    options = {"logit_bias": {"5": 1.5}, "structured_outputs": {"json": {"type": "object"}}}
    asked = request(2, stop=("ab", "\n"), num_logprobs=20, engine_options=options)
    validate_request(asked, LIMITS, ())


def test_a_stop_string_ends_a_completion_with_the_token_that_completed_it() -> None:
    whole = finish(engine_with(request()))
    stop = scripted_text(whole.token_ids[4:7])
    end = scripted_text(whole.token_ids).index(stop) + len(stop)
    done = finish(engine_with(request(stop=("?", stop))))
    assert done.token_ids == whole.token_ids[:end]
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, stop)


def test_a_stop_token_is_the_stop_reason() -> None:
    whole = finish(engine_with(request()))
    done = finish(engine_with(request(stop_token_ids=whole.token_ids[5:6])))
    assert done.stop_reason == done.token_ids[-1] == whole.token_ids[5]


def test_alternatives_come_with_each_token_the_sampled_one_first() -> None:
    done = finish(engine_with(request(num_logprobs=2)))
    assert [len(pairs) for pairs in done.top_logprobs] == [3] * 30
    assert [pairs[0] for pairs in done.top_logprobs] == list(
        zip(done.token_ids, done.logprobs, strict=True)
    )
    assert finish(engine_with(request())).top_logprobs == ()


def test_what_is_sampled_since_a_token_is_read_alone_and_changes_nothing() -> None:
    engine = engine_with(request(num_logprobs=1), replace(request(), request_id="b"))
    for _ in range(5):
        engine.step()
    (whole,) = engine.sampled_since({"a": 0})
    assert len(whole.token_ids) == 5
    (since,) = engine.sampled_since({"a": 2, "b": 5, "unknown": 0})
    assert since.finish_reason is FinishReason.ABORT
    for field in ("token_ids", "logprobs", "top_logprobs"):
        assert getattr(since, field) == getattr(whole, field)[2:]
    assert engine.sampled_since({"a": 2}) == [since]


def test_an_engine_sleeps_only_when_empty_and_needs_weights_to_go_on() -> None:
    engine = engine_with(request())
    with pytest.raises(RuntimeError, match="1 requests unfinished"):
        engine.sleep()
    finish(engine)
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.swap_weights(1)
    engine.wake_up()
    with pytest.raises(RuntimeError, match="weights"):
        engine.step()
    engine.swap_weights(1)
    engine.step()
