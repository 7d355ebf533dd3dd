"""12 concurrent chats by the official client, half of them streaming, over a real endpoint, while
weights are pulled 6 times and every replica is emptied 3 times: part of `replicas_scenario`.

Each chat is a session of two turns, the second of which has the first one's answer in its prompt.
They run twice: undisturbed, and disturbed; the pulled weights are the same, and sampling is greedy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.real.router_scenario import MAX_MODEL_LEN, NUM_PULLS
from torchtitan_rl.backends.monarch.endpoint import MonarchEndpoint
from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.weights.shm import SharedMemoryPublisher

NUM_CHATS = 12
ADMIN_KEY = "admin-of-the-test"
TURNS = (60, 400)  # tokens of each; a chat's second has up to 11 more


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn as the client saw it."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    version_runs: int


async def chat(client: AsyncOpenAI, number: int, session_id: str) -> tuple[Answer, ...]:
    """A conversation of two turns; odd ones stream."""
    messages: list[Any] = [{"role": "user", "content": f"Tell me of {number}. " + "ha " * number}]
    answers = []
    for turn, max_tokens in enumerate(TURNS):
        arguments: dict[str, Any] = {
            "model": "policy",
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": max_tokens + turn * number,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
            "extra_headers": {"X-Session-ID": session_id},
        }
        ask = streamed if number % 2 else whole
        answers.append(await ask(client, arguments))
        messages = [
            *messages,
            {"role": "assistant", "content": answers[-1].text},
            {"role": "user", "content": "Go on."},
        ]
    return tuple(answers)


async def whole(client: AsyncOpenAI, arguments: dict[str, Any]) -> Answer:
    response = await client.chat.completions.create(**arguments)
    (choice,) = response.choices
    extra, of_choice = response.model_extra or {}, choice.model_extra or {}
    assert response.usage is not None
    return Answer(
        text=choice.message.content or "",
        token_ids=tuple(of_choice["token_ids"]),
        prompt_token_ids=tuple(extra["prompt_token_ids"]),
        finish_reasons=(choice.finish_reason,),
        prompt_tokens=response.usage.prompt_tokens,
        completion_tokens=response.usage.completion_tokens,
        version_runs=len(of_choice["policy_versions"]),
    )


async def streamed(client: AsyncOpenAI, arguments: dict[str, Any]) -> Answer:
    text, token_ids, finish_reasons = "", [], []
    prompt_token_ids: Sequence[int] = ()
    usage, runs = None, 0
    stream = await client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        prompt_token_ids = (chunk.model_extra or {}).get("prompt_token_ids") or prompt_token_ids
        for choice in chunk.choices:
            extra = choice.model_extra or {}
            text += choice.delta.content or ""
            token_ids += extra.get("token_ids") or []
            runs = len(extra.get("policy_versions") or ()) or runs
            if choice.finish_reason:
                finish_reasons.append(choice.finish_reason)
    assert usage is not None
    return Answer(
        text=text,
        token_ids=tuple(token_ids),
        prompt_token_ids=tuple(prompt_token_ids),
        finish_reasons=tuple(finish_reasons),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        version_runs=runs,
    )


async def all_chats(client: AsyncOpenAI, prefix: str) -> list[tuple[Answer, ...]]:
    return await asyncio.gather(
        *(chat(client, number, f"{prefix}-{number}") for number in range(NUM_CHATS))
    )


async def disturb(
    router: GeneratorRouter, publisher: SharedMemoryPublisher, tensors: Any, url: str, first: int
) -> list[int]:
    """Pull and, every other time, pause by the admin route; returns the statuses."""
    statuses = []
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0) as admin:
        for version in range(first, first + NUM_PULLS):
            await asyncio.sleep(0.01)
            handle = await asyncio.to_thread(publisher.publish, version, tensors)
            if version % 2:
                statuses.append(
                    (await admin.post("/admin/pause", params={"mode": "abort"})).status_code
                )
            await router.sync_weights(handle, mode="hot_swap", order="one_by_one")
            if version % 2:
                statuses.append((await admin.post("/admin/resume")).status_code)
    return statuses


async def recorded(sessions: Sessions, prefix: str, chats: list[tuple[Answer, ...]]) -> int:
    """How many chats' sessions recorded exactly what the client saw; each gets a reward."""
    exact = 0
    for number, answers in enumerate(chats):
        report = await sessions.close(f"{prefix}-{number}", 1.0)
        sampled = [
            tuple(
                token
                for token, is_sampled in zip(one.token_ids, one.loss_mask, strict=True)
                if is_sampled
            )
            for one in report.episodes
        ]
        seen = [answer.token_ids for answer in answers]
        is_trained = report.tokens_trained == report.tokens_generated == sum(map(len, seen))
        exact += report.turns == len(TURNS) and is_trained and sum(sampled, ()) == sum(seen, ())
    return exact


async def spawn_endpoint(root: Path) -> MonarchEndpoint:
    spec = EndpointSpec(
        model=root / "model",
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        generation_config="vllm",
        endpoint=EndpointConfig(start_timeout_s=600.0),
        keys=Keys(admin=ADMIN_KEY),
        log_dir=root,
    )
    return await MonarchEndpoint.spawn(ProcessGroup(name="endpoint", ranks=1, threads=1), spec)


async def pulled_endpoint(
    endpoint: MonarchEndpoint,
    router: GeneratorRouter,
    publisher: SharedMemoryPublisher,
    tensors: Any,
    *,
    first: int,
) -> dict[str, Any]:
    """All chats, twice; ``first`` is the version of the first pull."""
    sessions = Sessions(router)
    before = await num_sampled(router)
    try:
        async with (
            EndpointService(endpoint, router, sessions, interval_s=0.02) as service,
            AsyncOpenAI(
                base_url=endpoint.base_url, api_key="any", max_retries=0, timeout=300.0
            ) as client,
        ):
            url = endpoint.base_url.removesuffix("/v1")
            alone = await all_chats(client, "alone")
            chats = asyncio.create_task(all_chats(client, "cut"))
            statuses = await disturb(router, publisher, tensors, url, first)
            was_over = chats.done()
            cut = await chats
            return {
                "statuses": sorted(set(statuses)),
                "pauses": len(statuses) // 2,
                "was_over": was_over,
                "complete": sum(map(is_complete, alone)) + sum(map(is_complete, cut)),
                "equal": sum(map(is_equal, alone, cut)),
                "cuts_heard": sum(one.version_runs - 1 for answers in cut for one in answers),
                "recorded": await recorded(sessions, "alone", alone)
                + await recorded(sessions, "cut", cut),
                "polled": service.counts.received,
                "completed": service.counts.completed,
                "refused": service.counts.by_refusal,
                "aborted": service.counts.aborted,
                "sampled": await num_sampled(router) - before,
                "answered": sum(len(one.token_ids) for each in (*alone, *cut) for one in each),
                "states": sorted(router.states().values()),
                "outstanding": sum(router.outstanding_tokens().values()),
                "pulled": sorted(version - first + 1 for version in router.versions().values()),
            }
    finally:
        await sessions.aclose()


async def num_sampled(router: GeneratorRouter) -> int:
    return sum(one.generated_tokens for one in (await router.stats()).values())


def is_complete(answers: tuple[Answer, ...]) -> bool:
    """Every count fits, wherever it is said; the second prompt is whole, too."""
    return all(
        one.finish_reasons == ("length",)
        and one.completion_tokens == len(one.token_ids)
        and one.prompt_tokens == len(one.prompt_token_ids)
        for one in answers
    ) and all(len(a.prompt_token_ids) < len(b.prompt_token_ids) for a, b in pairwise(answers))


def is_equal(alone: tuple[Answer, ...], cut: tuple[Answer, ...]) -> bool:
    return all(
        (a.text, a.token_ids, a.prompt_token_ids) == (b.text, b.token_ids, b.prompt_token_ids)
        for a, b in zip(alone, cut, strict=True)
    )
