"""Runs vLLM engines of policies that take images in a process of its own and saves what it saw, as
`vllm_scenarios` does: ``python -m tests.real.image_scenarios engines DIR``; ``endpoint DIR`` asks
an endpoint over HTTP, whose requests are recorded and answered without an engine."""

from __future__ import annotations

import asyncio
import base64
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.real.resume_scenarios import cut_everywhere
from tests.real.vllm_scenarios import (
    Checkpoints,
    TriggeredEngine,
    build,
    idle_pull,
    play,
    request,
    save,
)

# isort: split
import httpx

from tests.real.local_endpoint import local_endpoint
from tests.real.models import tiny_tokenizer
from tests.support.endpoints import endpoint_spec
from tests.support.images import file_of, picture
from torchtitan_rl.backends.vllm.openai import build_application
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.images import image_reader, place_images
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.types import Completion, FinishReason, GenerationRequest, VersionRun

PULL_STEP = 8
FROZEN = 3  # a version: the decoder of version 1 alone


class FrozenTower(Checkpoints):
    def tensors(self, version: int) -> Any:
        if version != FROZEN:
            return super().tensors(version)
        return {n: t for n, t in super().tensors(1).items() if not n.startswith("visual.")}


def requests_of(policy: Path) -> list[GenerationRequest]:
    """``other``: the tokens of ``greedy`` with another second picture. ``again`` has a placeholder
    in its text; ``samples`` samples some."""
    reader, tokenizer = image_reader(policy), tiny_tokenizer()
    assert reader is not None
    start, pad, end = tokenizer.convert_tokens_to_ids(
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    )
    first, second, third = (
        reader.read(picture(*size, seed=seed))
        for seed, size in enumerate([(60, 100), (150, 84), (150, 84)])
    )
    text = tuple(range(40, 60))
    whole = (*text, start, pad, end, *text, start, pad, end, *text)
    made = []

    def add(name: str, tokens: tuple[int, ...], images: list[Any], **sampling: Any) -> None:
        prompt, placed = place_images(tokens, pad, images)
        one = request(name, 24, prompt=prompt, **sampling)
        made.append(replace(one, images=placed))

    add("greedy", whole, [first, second], temperature=0.0)
    add("other", whole, [first, third], temperature=0.0)
    add("sampled", whole, [first, second], seed=5)
    add("text", text, [], temperature=0.0)
    add("samples", whole, [first, second], seed=6, engine_options={"logit_bias": {str(pad): 12.0}})
    (again,) = (one for one in made if one.request_id == "greedy")
    tail = (pad, *text, pad, pad)
    made.append(replace(again, request_id="again", prompt_token_ids=again.prompt_token_ids + tail))
    return made


def engines(root: Path) -> dict[str, Any]:
    paths = [root / f"v{version}" for version in range(3)]
    staged = FrozenTower(paths)
    requests = requests_of(paths[0])
    engine = build(paths[0], staged)
    seen: dict[str, Any] = {"requests": requests, "first": play(engine, requests)}
    seen["cached"] = play(engine, requests)
    seen["mixed"] = play(
        engine,
        [one for one in requests if one.request_id != "samples"],
        triggers=lambda loop: {PULL_STEP: lambda: loop.execute(Pull(1))},
    )
    seen["pulled"] = play(engine, requests)
    seen["cut"] = cut_everywhere(engine, requests[:2], stride=7)
    idle_pull(engine, 2)
    idle_pull(engine, FROZEN)
    seen["frozen"] = play(engine, requests)
    seen["refused"] = refusals(engine, requests[0])
    seen["fresh"] = play(build(paths[1], staged), requests)
    return seen


def refusals(engine: TriggeredEngine, valid: GenerationRequest) -> dict[str, str]:
    """The errors of requests with wrong images; afterwards the engine still answers."""
    image = valid.images[0]
    wrong = {
        "outside": [replace(image, start=len(valid.prompt_token_ids) - 2)],
        "overlap": [image, image],
        "no placeholders": [replace(image, start=1)],
        "another size": [replace(image, rows=1, columns=1)],
        "no picture": [replace(image, data=b"no picture")],
    }
    errors = {}
    for name, images in wrong.items():
        try:
            play(engine, [replace(valid, request_id=name, images=tuple(images))])
        except Exception as error:
            errors[name] = str(error)
    return errors


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(parts)}]
    return {"model": "policy", "messages": messages, "max_tokens": 4, **fields}


def shown(data: bytes, **fields: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def linked(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "what is <|image_pad|>?"}


def attacks() -> dict[str, dict[str, Any]]:
    from tests.fast.test_images import hostile_files

    small = file_of(picture(60, 60))
    files = {name: chat(TEXT, shown(data)) for name, data in hostile_files().items()}
    del files["too many bytes"]  # refused before, by the size of the body
    return files | {
        "fetched": chat(linked("http://127.0.0.1:9/a.png")),
        "a file": chat(linked("file:///etc/passwd")),
        "too many": chat(*[shown(small)] * 17),
        "an identifier": chat(shown(small, uuid="known")),
        "an identifier alone": chat({"type": "image_url", "image_url": None, "uuid": "known"}),
        "embeddings": chat({"type": "image_embeds", "image_embeds": "AAAA"}),
        "Pillow": chat({"type": "image_pil", "image_pil": "AAAA"}),
        "a video": chat({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}),
        "options": chat(shown(small), mm_processor_kwargs={"max_pixels": 1 << 40}),
        "more options": chat(shown(small), media_io_kwargs={"image": {"image_mode": None}}),
        "too long": chat(*[shown(file_of(picture(224, 224)))] * 16),
    }


def endpoint(root: Path) -> dict[str, Any]:
    return asyncio.run(asked(root / "v0"))


async def asked(policy: Path) -> dict[str, Any]:
    spec = endpoint_spec(policy, max_model_len=512, max_body_bytes=8 << 20)
    requests: list[GenerationRequest] = []

    def application(link: ControllerLink) -> EndpointApp:
        inner = build_application(spec, link)
        return EndpointApp(inner, spec.endpoint, keys=spec.keys, commands=link, takes_images=True)

    async def complete(request: GenerationRequest, on_progress: Any = None) -> Completion:
        requests.append(request)
        return Completion(
            request_id=request.request_id,
            token_ids=(70, 71),
            logprobs=(-1.0, -1.0),
            version_runs=(VersionRun(0, 0),),
            finish_reason=FinishReason.LENGTH,
        )

    first, second = file_of(picture(60, 100)), file_of(picture(150, 84, seed=1), "JPEG")
    valid = chat(TEXT, shown(first), {"type": "text", "text": "and"}, shown(second))
    async with (
        local_endpoint(application, complete, handlers={}) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
    ):

        async def ask(body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json()

        together = await asyncio.gather(*(ask(valid) for _ in range(4)), ask(chat(TEXT)))
        refused = {name: await ask(body) for name, body in attacks().items()}
        tokenized = await ask({k: valid[k] for k in ("model", "messages")}, "/tokenize")
        again = await ask(valid)
    return {
        "requests": requests,
        "answers": [*together, again],
        "refused": refused,
        "tokenized": tokenized,
        "content": [
            TEXT,
            {"type": "image", "image": first},
            {"type": "text", "text": "and"},
            {"type": "image", "image": second},
        ],
    }


if __name__ == "__main__":
    mode, root = sys.argv[1], Path(sys.argv[2])
    save(root, mode, {"engines": engines, "endpoint": endpoint}[mode](root))
