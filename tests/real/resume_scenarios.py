"""Requests of a vLLM engine that are cut and go on, part of `vllm_scenarios`.

The engine is stepped by hand, on each rank alike: a cut is an abort at an exact token, and what
goes on is what the router would ask for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan_rl.config.checks import CPU_BLOCK_TOKENS
from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.routing.continuation import join, remaining_request
from torchtitan_rl.types import Completion, GenerationRequest, Progress, SamplingParams, VersionRun

PROMPT = tuple(range(40, 70))
LETTERS = tuple(range(64, 90))  # the tiny tokenizer's ids of a to z
WHITE_SPACE = ("197", "198", "201", "220")  # its ids of tab, line feed, return and space
REGEX = "(ab|cd){4}e{1,3}x?(zq){3}"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": ["one", "two"]}, "yes": {"type": "boolean"}},
    "required": ["n", "yes"],
    "additionalProperties": False,
}
TEMPERATURE = 0.7  # of truncated requests
REFUSED: dict[str, Any] = {
    "an unknown name": {"nonsense": 1},
    "a field of ours": {"seed": 1},
    "several completions": {"n": 2},
    "prompt logprobs": {"prompt_logprobs": 1},
    "a wrong type": {"presence_penalty": "much"},
    "a wrong value": {"presence_penalty": 3.0},
    "a wrong type inside": {"bad_words": [1]},
    "an id outside the vocabulary": {"logit_bias": {"100000": 1.0}},
    "an id that is no number": {"allowed_token_ids": ["a"]},
    "more tokens than a step on CUDA takes": {"allowed_token_ids": [65] * 1025},
    "two grammars": {"structured_outputs": {"regex": "a", "json": {}}},
    "a grammar with an unknown name": {"structured_outputs": {"regex": "a", "other": 1}},
    "a broken regex": {"structured_outputs": {"regex": "("}},
    "a broken schema": {"structured_outputs": {"json": {"type": 5}}},
    "a broken grammar": {"structured_outputs": {"grammar": "root ::= missing"}},
}


def greedy(name: str, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerationRequest:
    defaults = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{**defaults, **sampling}),
    )


def run_all(engine: Any, requests: list[GenerationRequest]) -> dict[str, Completion]:
    for request in requests:
        engine.add_request(request, arrival_s=0.0)
    done = {}
    while engine.num_unfinished():
        done |= {output.request_id: _completion(output) for output in engine.step()}
    return done


def sensitive_requests(engine: Any) -> list[GenerationRequest]:
    """Requests whose next token depends on which of the earlier ones were sampled."""
    spelled = {"allowed_token_ids": list(LETTERS), "repetition_penalty": 1.1}
    plain = greedy("plain")
    letters = greedy("letters", engine_options=spelled)
    done = run_all(engine, [plain, letters])
    text = "".join(chr(ord("a") + token - LETTERS[0]) for token in done["letters"].token_ids)
    end = next(end for end in range(14, 32) if text.find(text[end - 4 : end]) == end - 4)
    twice = next(letter for letter in text[:8] if letter in text[9:])
    longer = tuple(40 + index % 97 for index in range(4 * CPU_BLOCK_TOKENS - 20))
    common = done["plain"].token_ids[:3]
    return [
        plain,
        greedy("stop string", stop=("never", text[end - 4 : end]), engine_options=spelled),
        greedy("early stop string", stop=(twice,), min_tokens=8, engine_options=spelled),
        greedy("penalties", engine_options={"frequency_penalty": 1.5, "presence_penalty": 1.0}),
        greedy("repetition penalty", engine_options={"repetition_penalty": 1.7}),
        greedy("minimum", stop_token_ids=common, min_tokens=20),
        greedy("bad words", engine_options=spelled | {"bad_words": [text[5:8], text[9:11]]}),
        greedy("bias", num_logprobs=3, engine_options={"logit_bias": {"65": 3.5, "66": 3.0}}),
        greedy("repetition", engine_options=_looping()),
        greedy("regex", ignore_eos=False, engine_options=_structured(regex=REGEX)),
        greedy("json", ignore_eos=False, engine_options=_compact_json()),
        greedy("cached prompt", prompt=longer),
    ]


def truncated_requests() -> list[GenerationRequest]:
    """One temperature, and every way to cut tokens."""
    cuts: dict[str, dict[str, Any]] = {
        "nothing": {},
        "top_p": {"top_p": 0.7},
        "top_k": {"top_k": 5},
        "min_p": {"min_p": 0.05},
        "all three": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
        "minimum length": {"min_tokens": 12, "ignore_eos": False},
        "allowed tokens": {"engine_options": {"allowed_token_ids": list(LETTERS)}},
        "regex": {"engine_options": _structured(regex=REGEX)},
        "json": {"engine_options": _structured(json=SCHEMA)},
        "choice": {"engine_options": _structured(choice=["north", "south", "southwest"])},
        "grammar": {"engine_options": _structured(grammar='root ::= "a" [b-x]+ "yz"')},
        "json and top_p": {"top_p": 0.8, "engine_options": _structured(json=SCHEMA)},
        "regex and minimum": {"min_tokens": 9, "engine_options": _structured(regex=REGEX)},
    }
    return [
        greedy(name, **{"temperature": TEMPERATURE, "seed": seed, "ignore_eos": False, **sampling})
        for seed, (name, sampling) in enumerate(cuts.items())
    ]


def _structured(**how: Any) -> dict[str, Any]:
    return {"structured_outputs": how}


def _compact_json() -> dict[str, Any]:
    """Without white space, of which a random model would never have enough."""
    return {"logit_bias": dict.fromkeys(WHITE_SPACE, -100.0), **_structured(json=SCHEMA)}


def _looping() -> dict[str, Any]:
    """Two letters alone: sooner or later they repeat."""
    detection = {"max_pattern_size": 2, "min_count": 4}
    return {"allowed_token_ids": [65, 66], "repetition_detection": detection}


def cut_everywhere(
    engine: Any, requests: list[GenerationRequest], stride: int = 1
) -> dict[str, list[Completion]]:
    """Each request undisturbed, then cut after 0, ``stride``, ... tokens and continued. A step of
    speculative decoding may go past the token of a cut."""
    seen = {name: [done] for name, done in run_all(engine, requests).items()}
    pieces: dict[str, GenerationRequest] = {}
    cuts: dict[str, int] = {}
    for request in requests:
        for cut in range(0, len(seen[request.request_id][0].token_ids), stride):
            name = f"{request.request_id}@{cut}"
            pieces[name], cuts[name] = replace(request, request_id=name), cut
    so_far: dict[str, Completion] = {}
    joined: dict[str, Completion] = {}
    for request in pieces.values():
        engine.add_request(request, arrival_s=0.0)
    while engine.num_unfinished():
        due = tuple(
            name
            for name, size in engine.generated_lengths().items()
            if name in cuts and name not in so_far and size >= cuts[name]
        )
        for output in engine.abort(due):
            name = output.request_id
            so_far[name] = _completion(output)
            rest = remaining_request(pieces[name], so_far[name], attempt=1)
            assert rest is not None
            engine.add_request(rest, arrival_s=0.0)
        for output in engine.step():
            name = output.request_id.removesuffix("#1")
            first = [so_far[name]] if name in so_far else []
            joined[name] = join(name, [*first, _completion(output)])
    for name in pieces:
        seen[name.split("@")[0]].append(joined[name])
    return seen


def progress(engine: Any, request: GenerationRequest) -> dict[str, Any]:
    """A request, and what was read of it every few steps, only what was new each time."""
    engine.add_request(request, arrival_s=0.0)
    read: list[Progress] = []
    size = 0
    while True:
        if ended := engine.step():
            return {"done": _completion(ended[0]), "read": read}
        if engine.steps % 5 == 0:
            read += engine.sampled_since({request.request_id: size, "unknown": 0})
            size = sum(len(output.token_ids) for output in read)
            assert engine.sampled_since({request.request_id: size}) == []


def refused_alongside_a_neighbour(engine: Any) -> dict[str, Any]:
    """A neighbour's completion, and what each request that came while it ran was told."""
    neighbour = greedy("neighbour")
    engine.add_request(neighbour, arrival_s=0.0)
    told = {}
    for name, options in REFUSED.items():
        engine.step()
        try:
            bad = greedy(name, engine_options=options)
            engine.add_request(bad, arrival_s=0.0)
        except InvalidRequestError as error:
            told[name] = str(error)
    try:
        engine.sleep()
    except RuntimeError as error:
        told["sleep"] = str(error)
    done = run_all(engine, [])
    return {"told": told, "neighbour": done["neighbour"], "awake": slept(engine)}


def slept(engine: Any) -> Completion:
    """A completion after a sleep; here vLLM's own keeps the memory, but does all else."""
    inner = engine._engine
    spec = inner._spec
    inner._spec = replace(spec, sleeps=True, device="cuda")
    engine.sleep()
    assert inner._engine.is_sleeping()
    engine.wake_up()
    inner._spec = spec
    engine.sleep()
    engine.wake_up()
    return run_all(engine, [greedy("awake")])["awake"]


def alternatives(engine: Any, model: str) -> dict[str, Any]:
    """The most likely tokens at each position, here and by vLLM's own front door."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    options: dict[str, Any] = {"temperature": 0.7, "seed": 5}
    mine = run_all(engine, [greedy("mine", num_logprobs=4, **options)])["mine"]
    front_door = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=32 << 20,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    params = VllmSamplingParams(max_tokens=32, logprobs=4, ignore_eos=True, **options)
    (output,) = front_door.generate({"prompt_token_ids": list(PROMPT)}, params, use_tqdm=False)
    theirs = output.outputs[0]
    return {
        "mine": mine,
        "their token_ids": tuple(theirs.token_ids),
        "theirs": [
            {token: entry.logprob for token, entry in position.items()}
            for position in theirs.logprobs
        ],
    }


def _completion(output: Completion) -> Completion:
    return replace(output, version_runs=(VersionRun(0, 0),) if output.token_ids else ())
