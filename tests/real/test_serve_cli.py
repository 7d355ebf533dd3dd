"""``torchtitan-rl serve`` as its users have it: a process, the official client, signals."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.real.runs import ROOT, Run
from tests.real.served import Served, serve
from torchtitan_rl import Judge, JudgeConfig, Problem, Rollout, RolloutStatus, Score

POLICY = ROOT / "experiments" / "alphabet_sort" / "policy"
PROMPTS = [[7 + index, 20, 31 + index, 44, 5, 60 + index] for index in range(12)]
LONG = 700  # tokens
PROBLEM = Problem(problem_id="p", data={})
TENTHS = [number / 10 for number in range(10)]
# vLLM's guide for CPUs preloads OpenMP, which then counts its threads before Python starts. Engines
# of another number of threads than the shell's have died of it.
OPENMP = list((Path(torch.__file__).parent / "lib").glob("libgomp*"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    served = serve(
        folder,
        POLICY,
        *("--generator.replicas", "2", "--generator.max-model-len", "1024"),
        *("--generator.max-restarts", "0"),  # see test_killed_processes
        *("--episodes-file", str(folder / "episodes.jsonl")),
        environment={
            "LD_PRELOAD": " ".join(map(str, OPENMP)),
            "OMP_NUM_THREADS": "2",
            "TORCHTITAN_RL_ADMIN_KEY": "chief",
        },
    )
    try:
        yield served
    finally:
        served.run.kill_all()


def client_of(server: Served, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=300)


def rollout_of(completion: str) -> Rollout:
    return Rollout(
        rollout_id="g/r0",
        group_id="g",
        problem_id="p",
        turns=(),
        status=RolloutStatus.COMPLETED,
        reward=None,
        messages=({"role": "assistant", "content": completion},),
    )


def await_idle(server: Served) -> None:
    def is_idle() -> bool:
        running = server.gauge("engine_running_requests")
        return running + server.gauge("engine_waiting_requests") == 0

    server.wait_until(is_idle, "idle engines")


def greedy(prompt: list[int], max_tokens: int = LONG) -> dict[str, Any]:
    return {
        "model": "policy",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }


async def complete_all(server: Served, on_sent: Callable[[], Any]) -> list[list[int]]:
    """All prompts at once; ``on_sent`` runs in a thread once they are on their way."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=300
    ) as client:
        asked = [asyncio.create_task(client.completions.create(**greedy(p))) for p in PROMPTS]
        await asyncio.to_thread(on_sent)
        answers = await asyncio.gather(*asked)
    return [answer.choices[0].token_ids for answer in answers]


def test_the_official_client_chats_streams_and_takes_several_choices(server: Served) -> None:
    client = client_of(server)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert [model.id for model in client.models.list()] == ["policy"]
    asked: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "sort: Mia, Ada"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    several = client.chat.completions.create(**asked | {"n": 3, "temperature": 1.0, "seed": 5})
    again = client.chat.completions.create(**asked | {"n": 3, "temperature": 1.0, "seed": 5})
    assert len(several.choices) == 3
    assert [c.message.content for c in several.choices] == [
        c.message.content for c in again.choices
    ]


def test_trap_35_a_prompt_longer_than_the_context_is_a_400_and_disturbs_no_other_request(
    server: Served,
) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        client_of(server).completions.create(model="policy", prompt=[5] * 2000, max_tokens=4)
    answer = client_of(server).completions.create(**greedy(PROMPTS[0], 8))
    assert len(answer.choices[0].token_ids) == 8


def test_a_judge_scores_rollouts_with_a_model_at_this_endpoint(server: Served) -> None:
    """Ten rollouts, two of which say the same."""
    config = JudgeConfig(
        base_url=f"{server.url}/v1",
        prompt="Score this: {completion}",
        options={"max_tokens": 16, "structured_outputs": {"regex": "Score: [0-9]"}},
        max_concurrent=4,
    )
    said = [f"name {number % 9}" for number in range(10)]

    async def judged() -> list[Score]:
        judge = Judge(config)
        try:
            return await asyncio.gather(*(judge.score(rollout_of(t), PROBLEM) for t in said))
        finally:
            await judge.close()

    scores = asyncio.run(judged())
    assert [score.reward for score in scores if score.reward not in TENTHS] == []
    assert scores[9].reward == scores[0].reward
    assert sum(score.components["requests"] for score in scores) == 9
    asked = [score for score in scores if score.components["requests"]]
    assert all(score.components["prompt_tokens"] > 10 for score in asked)
    assert all(1 < score.components["completion_tokens"] <= 16 for score in asked)


def test_a_client_that_leaves_has_its_requests_aborted_on_the_engines(server: Served) -> None:
    await_idle(server)
    aborted = server.gauge("requests_aborted_total")
    sampled = server.gauge("engine_generated_tokens")
    asked = greedy(PROMPTS[0], 1000) | {"temperature": 1.0, "n": 8}
    stream = client_of(server).completions.create(**asked, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until(lambda: server.gauge("requests_aborted_total") == aborted + 8, "8 aborts")
    # The engines are read about once a second: only a reading after the beginning counts.
    server.wait_until(lambda: server.gauge("engine_generated_tokens") > sampled, "a reading")
    await_idle(server)
    assert server.gauge("engine_generated_tokens") - sampled < 4000


def test_a_session_with_a_reward_leaves_its_exact_tokens_in_the_episodes_file(
    server: Served,
) -> None:
    client = client_of(server, "any:game-1")
    first = client.completions.create(**greedy(PROMPTS[1], 6)).choices[0].token_ids
    history = [*PROMPTS[1], *first, 9, 9]
    second = client.completions.create(**greedy(history, 5)).choices[0].token_ids
    reward = httpx.post(f"{server.url}/v1/sessions/game-1/reward", json={"reward": 0.5}, timeout=60)
    assert reward.status_code == 200, reward.text
    (line,) = (server.folder / "episodes.jsonl").read_text().splitlines()
    episode = json.loads(line)
    assert (episode["session_id"], episode["reward"]) == ("game-1", 0.5)
    assert episode["token_ids"] == [*history, *second]
    masked = [False] * 6 + [True] * 6 + [False] * 2 + [True] * 5
    assert episode["loss_mask"] == masked
    with pytest.raises(openai.BadRequestError, match="game-1"):
        client.completions.create(**greedy(PROMPTS[1], 4))


def test_a_checkpoint_is_loaded_while_requests_run_and_answers_have_its_version(
    server: Served, tmp_path: Path
) -> None:
    def load(path: Path) -> dict[str, Any]:
        response = httpx.post(
            f"{server.url}/admin/load",
            json={"path": str(path)},
            headers={"Authorization": "Bearer chief"},
            timeout=300,
        )
        assert response.status_code == 200, response.text
        return response.json()

    client = client_of(server)
    before = client.completions.create(**greedy(PROMPTS[3], 40)).choices[0]
    changed = tmp_path / "changed"
    shutil.copytree(POLICY, changed)
    tensors = load_file(changed / "model.safetensors")
    final_norm = {"model.norm.weight": -tensors["model.norm.weight"]}
    save_file({**tensors, **final_norm}, changed / "model.safetensors", metadata={"format": "pt"})
    is_loaded = Event()

    def ask_until_loaded(prompt: str) -> list[list[int]]:
        """The versions of each answer."""
        seen = []
        while not is_loaded.is_set():
            choice = client.completions.create(**greedy(prompt)).choices[0]
            seen.append([version for _, version in choice.policy_versions])
        return seen

    with ThreadPoolExecutor() as pool:
        sampled = server.gauge("engine_generated_tokens")
        running = [pool.submit(ask_until_loaded, prompt) for prompt in PROMPTS[:4]]
        server.wait_until(
            lambda: server.gauge("engine_generated_tokens") > sampled, "tokens being sampled"
        )
        answer = load(changed)
        is_loaded.set()
        seen = [versions for future in running for versions in future.result()]
    assert answer["replicas"] == {"replica0": 1, "replica1": 1}
    assert answer["lost"] == []
    assert [0, 1] in seen
    assert [versions for versions in seen if versions not in ([0], [0, 1], [1])] == []
    after = client.completions.create(**greedy(PROMPTS[3], 40)).choices[0]
    assert after.policy_versions == [[0, 1]]
    assert after.token_ids != before.token_ids
    assert load(POLICY)["version"] == 2
    again = client.completions.create(**greedy(PROMPTS[3], 40)).choices[0]
    assert (again.token_ids, again.policy_versions) == (before.token_ids, [[0, 2]])


def test_trap_11_answers_are_whole_and_greedy_ones_right_when_a_replica_is_killed(
    server: Served,
) -> None:
    undisturbed = asyncio.run(complete_all(server, lambda: None))
    assert {len(tokens) for tokens in undisturbed} == {LONG}

    def kill_one() -> None:
        before = server.gauge("engine_generated_tokens")
        server.wait_until(
            lambda: server.gauge("engine_generated_tokens") > before + 100, "tokens being sampled"
        )
        server.run.process_of("replica1-rank0").send_signal(signal.SIGKILL)

    assert asyncio.run(complete_all(server, kill_one)) == undisturbed
    # The status is read once a second.
    server.wait_until(lambda: server.gauge("replicas_live") == 1, "one replica left")
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_sigterm_lets_running_requests_end_and_leaves_no_process(server: Served) -> None:
    stream = client_of(server).completions.create(**greedy(PROMPTS[2], 40), stream=True)
    chunks = [next(iter(stream))]
    server.run.process.terminate()
    chunks += list(stream)
    tokens = [token for chunk in chunks if chunk.choices for token in chunk.choices[0].token_ids]
    assert len(tokens) == 40
    assert server.run.wait() == 128 + signal.SIGTERM, server.run.log.read_text()[-2000:]
    assert server.run.left_behind() == []
    assert "Traceback" not in server.run.log.read_text()


def test_a_taken_port_is_one_error_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run(
            [str(POLICY), "--endpoint.port", str(port), "--log-dir", str(tmp_path / "logs")],
            command="serve",
            log=tmp_path / "log",
        )
        assert run.wait() == 2
    (line,) = run.log.read_text().splitlines()
    assert f"endpoint.port {port}" in line
    assert not (tmp_path / "logs").exists()
