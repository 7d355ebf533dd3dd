"""Requests that continue after tokens sampled for them before, as if never interrupted.

| for | the resumed tokens are |
|---|---|
| stop strings, penalties, bad words, minimum lengths, repetition detection, grammars | output |
| scheduling (computed at once, or served from the prefix cache) | prompt |

The detokenizer, the scheduler and the model runner each get them once, at admission, and in the
same way on every rank.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


def build_core_request(core: Any, engine_request: Any, num_resumed: int) -> Any:
    """vLLM's `Request` for its core, from an `EngineCoreRequest` whose last ``num_resumed`` prompt
    tokens were sampled before (0: a request that is not resumed).

    Its grammar is compiled and its reasoning parser created here: their errors refuse this request
    alone, and ranks that compiled in the background would start it at different steps. Of
    ``engine_request`` only the tokens before the resumed ones stay as its prompt.

    Raises:
        ValueError: the grammar rejects the resumed tokens.
    """
    request, _ = core.preprocess_add_request(engine_request)
    structured = request.structured_output_request
    if structured is not None and isinstance(structured._grammar, Future):
        structured.grammar = structured._grammar.result()
    core.structured_output_manager._get_reasoner(request)
    if num_resumed:
        tokens = engine_request.prompt_token_ids
        resumed = tokens[-num_resumed:]
        # num_prompt_tokens, of which the scheduler counts cached ones, stays that of all tokens.
        engine_request.prompt_token_ids = request.prompt_token_ids = tokens[:-num_resumed]
        request._output_token_ids.extend(resumed)
        if not core.structured_output_manager.accept_tokens(request, resumed):
            raise ValueError("the tokens to resume from do not fit its structured output")
    return request


def resumed_detokenizer(tokenizer: Any, engine_request: Any, request: Any) -> Any:
    """A detokenizer that has read the resumed tokens; ``tokenizer`` is None without stop strings.

    vLLM searches for stop strings only after ``min_tokens`` output tokens. `vllm_sampling_params`
    adds ``num_resumed`` to that, so the resumed tokens are decoded but never searched alone.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, engine_request)
    detokenizer.update(list(request.output_token_ids), False)
    return detokenizer


def let_runner_resume(core: Any, runner: Any) -> None:
    """Make vLLM's V1 model runner treat resumed tokens as output, as its V2 runner does.

    The V2 runner (on CUDA) gets prompt and output tokens separately, as after a preemption. The V1
    runner gets the prompt alone, and the output here, when it adds the request to its batch.
    """
    if core.vllm_config.use_v2_model_runner:
        return
    add_row = runner.input_batch.add_request
    requests = core.scheduler.requests

    def add_row_with_resumed(state: Any) -> Any:
        start = len(state.output_token_ids)
        state.output_token_ids.extend(requests[state.req_id].output_token_ids[start:])
        return add_row(state)

    runner.input_batch.add_request = add_row_with_resumed
