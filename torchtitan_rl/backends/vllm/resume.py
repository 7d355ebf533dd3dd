"""Requests that go on behind tokens that were sampled for them before, as if never interrupted.

Those tokens are OUTPUT to everything that asks what was sampled: stop strings, penalties, bad
words, minimum lengths, repetition detection, grammars. To scheduling they are prompt: computed at
once, and served from the prefix cache where they are in it. The detokenizer, the scheduler and the
model runner are told apart from each other, each once, at admission; every rank does it alike.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


def scheduled_request(core: Any, checked: Any, num_resumed: int) -> Any:
    """vLLM's `Request` of an `EngineCoreRequest` whose last prompt tokens were sampled before.

    Its grammar has been compiled, and its reasoning parser made: what is wrong with them is raised
    now, while only this request can be refused, and ranks that compiled in the background would
    begin it at different steps.
    ``checked`` keeps the tokens before those as its prompt.

    Raises:
        ValueError: the resumed tokens are none of the grammar's.
    """
    request, _ = core.preprocess_add_request(checked)
    structured = request.structured_output_request
    if structured is not None and isinstance(structured._grammar, Future):
        structured.grammar = structured._grammar.result()
    core.structured_output_manager._get_reasoner(request)
    if num_resumed:
        tokens = checked.prompt_token_ids
        resumed = tokens[-num_resumed:]
        # num_prompt_tokens, of which the scheduler counts cached ones, stays that of all tokens.
        checked.prompt_token_ids = request.prompt_token_ids = tokens[:-num_resumed]
        request._output_token_ids.extend(resumed)
        if not core.structured_output_manager.accept_tokens(request, resumed):
            raise ValueError("the tokens to resume from do not fit its structured output")
    return request


def resumed_detokenizer(tokenizer: Any, checked: Any, request: Any) -> Any:
    """A detokenizer that has read the resumed tokens, too; ``tokenizer`` is None without stops.

    It finds no stop string in them, for they are no more than the least it must have.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, checked)
    detokenizer.update(list(request.output_token_ids), False)
    return detokenizer


def let_runner_resume(core: Any, runner: Any) -> None:
    """Make vLLM's first model runner take resumed tokens as output; its second does by itself.

    The second (on CUDA) is given prompt and tokens apart, as after a preemption; the first is given
    the prompt alone, and learns the rest here when it makes the request's row of its batch.
    """
    if core.vllm_config.use_v2_model_runner:
        return
    add_row = runner.input_batch.add_request
    requests = core.scheduler.requests

    def add_row_with_resumed(state: Any) -> Any:
        known = len(state.output_token_ids)
        state.output_token_ids.extend(requests[state.req_id].output_token_ids[known:])
        return add_row(state)

    runner.input_batch.add_request = add_row_with_resumed
