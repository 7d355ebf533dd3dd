"""Agents with the official client, through HTTP and a vLLM engine: part of `openai_scenario`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import openai

from tests.real.local_endpoint import local_endpoint
from torchtitan_rl.agents.agent import AgentCall, AgentCommand, AgentResult
from torchtitan_rl.agents.env import AgentEnv, AgentHost, AgentThread
from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.backends.vllm.openai import build_application
from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import Problem, Rollout

API_KEY = "secret"
CONTROLLER: list[tuple[asyncio.AbstractEventLoop, GeneratorRouter]] = []  # of this process
CONFIG = RolloutConfig(
    max_turns=4,
    max_total_tokens=400,
    step_timeout_s=60.0,
    sampling=SamplingConfig(temperature=0.9, max_tokens_per_turn=300),
)
STOP = ["e", "t", "7", "q"]  # in 300 tokens random weights sample one of them
IDS = {"return_token_ids": True}
COMMAND = """
import json, os, sys
import openai
client = openai.OpenAI()
problem = json.load(sys.stdin)
completion = client.completions.create(
    model=os.environ["TORCHTITAN_RL_MODEL"], prompt=problem["data"]["prompt"], max_tokens=5,
    extra_body={"return_token_ids": True})
print(json.dumps({"reward": len(completion.choices[0].token_ids)}))
"""


def client(call: AgentCall, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=call.base_url, api_key=call.api_key, **options)


async def conversation(call: AgentCall, said: list[Any]) -> float:
    """Token prompts that extend; sampling that the run overrides or ignores."""
    prompt = [5, 6, 7]
    for _ in range(3):
        completion = await client(call).completions.create(
            model=call.model,
            prompt=prompt,
            max_tokens=8,
            temperature=0.3,
            top_p=0.5,
            logprobs=2,
            extra_body=IDS,
        )
        (choice,) = completion.choices
        said.append([choice.prompt_token_ids, choice.token_ids, choice.logprobs.token_logprobs])
        prompt = [*choice.prompt_token_ids, *choice.token_ids, 9]
    return 1.0


async def streamed_chat(call: AgentCall, said: list[Any]) -> float:
    chat = await client(call).chat.completions.create(
        model=call.model,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stop=STOP,
        max_tokens=300,
        extra_body=IDS,
    )
    prompt: list[int] = []
    token_ids: list[int] = []
    async for chunk in chat:
        prompt += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            token_ids += getattr(choice, "token_ids", None) or []
            said_reason = choice.finish_reason
    said.append([prompt, token_ids, said_reason])
    return 1.0


async def streamed_pieces(call: AgentCall, said: list[Any]) -> float:
    stream = await client(call).completions.create(
        model=call.model, prompt=[5, 6, 7], stream=True, max_tokens=300, extra_body=IDS
    )
    async for chunk in stream:
        said += [choice.token_ids for choice in chunk.choices if choice.token_ids]
    return 1.0


async def two_choices(call: AgentCall, said: list[Any]) -> float:
    completion = await client(call).completions.create(
        model=call.model, prompt=[5, 6], n=2, max_tokens=6, extra_body=IDS
    )
    said += [[[5, 6], choice.token_ids] for choice in completion.choices]
    return 1.0


async def over_the_limit(call: AgentCall, said: list[Any]) -> float:
    for turn in range(9):
        try:
            await client(call).completions.create(model=call.model, prompt=[5, turn], max_tokens=4)
        except openai.BadRequestError as error:
            said.append([turn, error.code])
            return 0.25
    return 1.0


async def impatient(call: AgentCall, said: list[Any]) -> float:
    """Not the official client, to which the endpoint gives time to try again."""
    headers = {"Authorization": f"Bearer {call.api_key}"}
    body = {"model": call.model, "prompt": [5, 6], "max_tokens": 300}
    async with httpx.AsyncClient(headers=headers, timeout=60.0) as http:
        asking = asyncio.create_task(http.post(f"{call.base_url}/completions", json=body))
        while not await is_sampling("impatient"):
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.wait({asking})
        said.append("gone" if asking.cancelled() else "answered")
    await client(call).completions.create(model=call.model, prompt=[8, 9], max_tokens=4)
    return 1.0


async def is_sampling(rollout: str) -> bool:
    """From the agents' thread: does the router have a request of this rollout?"""
    loop, router = CONTROLLER[0]
    known = asyncio.run_coroutine_threadsafe(router.partials(), loop)
    return any(name.startswith(rollout) for name in await asyncio.wrap_future(known))


async def posts_its_reward(call: AgentCall, said: list[Any]) -> None:
    await client(call).completions.create(model=call.model, prompt=[5, 6], max_tokens=4)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {call.api_key}"}) as http:
        answer = await http.post(
            f"{call.base_url}/sessions/{call.session_id}/reward", json={"reward": 0.75}
        )
    said.append(answer.json())
    try:
        await client(call).completions.create(model=call.model, prompt=[5, 6])
    except openai.BadRequestError as error:
        said.append(error.code)


async def biased(call: AgentCall, said: list[Any]) -> float:
    await client(call).completions.create(
        model=call.model, prompt=[5], max_tokens=4, logit_bias={"7": 100}
    )
    return 1.0


async def blocking(call: AgentCall, said: list[Any]) -> AgentResult:
    """The synchronous client on the agents' event loop."""
    synchronous = openai.OpenAI(base_url=call.base_url, api_key=call.api_key)
    completion = synchronous.completions.create(model=call.model, prompt=[5], max_tokens=4)
    said.append(completion.choices[0].finish_reason)
    return AgentResult(reward=1.0)


AGENTS = (
    conversation,
    streamed_chat,
    streamed_pieces,
    two_choices,
    over_the_limit,
    impatient,
    posts_its_reward,
    biased,
    blocking,
)


def described(rollout: Rollout, said: list[Any]) -> dict[str, Any]:
    episodes = rollout_to_episodes(rollout, 1.0)
    return {
        "said": said,
        "status": rollout.status.value,
        "cause": rollout.cause,
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "texts": [turn.text for turn in rollout.turns],
        "seen": [turn.is_seen for turn in rollout.turns],
        "turns": [
            [
                turn.prompt_token_ids,
                turn.completion.token_ids,
                turn.completion.logprobs,
                turn.completion.finish_reason.value,
            ]
            for turn in rollout.turns
        ],
        "episodes": [[episode.token_ids, episode.loss_mask] for episode in episodes],
    }


async def roll_out_all(router: GeneratorRouter, host: AgentHost, decode: Any) -> dict[str, Any]:
    async def one(name: str, agent: Any, said: list[Any]) -> tuple[str, dict[str, Any]]:
        rollouter = Rollouter(
            generate=router.generate,
            environment=lambda problem: AgentEnv(
                agent=agent, problem=problem, host=host, decode=decode
            ),
            config=CONFIG,
        )
        problem = Problem(problem_id=name, data={"prompt": [5, 6, 7]})
        group = await rollouter.run_group(name, problem, size=1, seed=3)
        return name, described(group.rollouts[0], said)

    running = [one("command", AgentCommand(argv=(sys.executable, "-c", COMMAND)), [])]
    for function in AGENTS:
        said: list[Any] = []

        async def agent(call: AgentCall, function: Any = function, said: Any = said) -> Any:
            return await function(call, said)

        running.append(one(function.__name__, agent, said))
    return dict(await asyncio.gather(*running))


async def play_agents(spec: EndpointSpec, router: GeneratorRouter) -> dict[str, Any]:
    """From each agent's name to what it saw (``said``) and to what its rollout has."""
    CONTROLLER.append((asyncio.get_running_loop(), router))
    sessions = Sessions(router)

    def application(link: ControllerLink) -> EndpointApp:
        inner = build_application(spec, link)
        return EndpointApp(inner, spec.endpoint, keys=Keys(api=API_KEY), commands=link)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    async with local_endpoint(application, sessions.complete, handlers=sessions.handlers()) as url:
        with AgentThread() as agents:
            host = AgentHost(
                base_url=f"{url}/v1",
                model="policy",
                sessions=sessions,
                api_key=API_KEY,
                loop=agents.loop,
            )
            results = await roll_out_all(router, host, tokenizer.decode)
        results["counts"] = dict(sessions.counts())
    await sessions.aclose()
    return results
