"""Runs the rollouts of a verifiers environment: a program for an interpreter that has verifiers.

``describe SPEC`` prints the environment's tasks as JSON, or why they cannot be listed. ``serve
SPEC`` reads from stdin which rollouts to run or to cancel, and writes the result of each rollout;
each message is one line of JSON. The program ends when its stdin is closed. It imports nothing from
torchtitan_rl, which need not be installed for this interpreter (see `agents/verifiers/task.py`).

Model calls go to the run's endpoint, with the name of the trace in the header ``X-Session-ID``. The
traces of agents that are trained are named after the rollout's session.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import verifiers.v1 as vf

_CHAT = "torchtitan_rl_chat"  # the harness in this folder
_KEY = "TORCHTITAN_RL_WORKER_API_KEY"  # verifiers reads the endpoint's key from the environment
_CLOSING_S = 10.0
_ERROR_CHARS = 1000
_ADVICE = re.compile(r"For further information visit \S+")  # in errors of pydantic


def main() -> None:
    """Run a command. stdout is for the caller; what the environment prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    command, spec = sys.argv[1], json.loads(sys.argv[2])
    try:
        environment = load(spec)
        if command == "describe":
            answers.write(json.dumps({"tasks": tasks(environment, spec["num_problems"])}) + "\n")
        else:
            asyncio.run(Worker(environment, answers).serve())
    except Exception as error:
        answers.write(json.dumps({"error": one_line(error)}) + "\n")
        sys.exit(1)


def load(spec: Mapping[str, Any]) -> vf.Env:
    """Load the environment; any exception: there is none, or it does not accept these options."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.compile import validate_pairing

    env_id, _, taskset_id = spec["env"].rpartition("+")
    options = {**spec["args"], "id": env_id, "taskset.id": taskset_id}
    config = vf.resolve_env_config(nested(options))
    found = agent_config_fields(config)
    for name, part in {"": config, **found}.items():
        if part.retries != type(part.retries)():
            option = f"{name}.retries".strip(".")
            raise ValueError(f"{option}: what failed would be trained on, too; leave it out")
    agents = {name: local(name, agent, taskset_id) for name, agent in found.items()}
    environment = vf.load_environment(config.model_copy(update=agents))
    if len(agents) == 1:  # a single agent gets the taskset's own tasks, which it must accept
        (agent,) = agents.values()
        task = type(environment.taskset).task_type()
        tools = task.toolsets(config.taskset.task)
        validate_pairing(vf.load_harness(agent.harness), task, agent.runtime, tools=tools)
    return environment


def local(name: str, agent: vf.AgentConfig, taskset_id: str) -> vf.AgentConfig:
    """Complete the agent's configuration. If the environment does not say how to run the agent, it
    runs in this process, as a chat: verifiers would give the policy a shell in a remote sandbox.
    Raises ValueError: the agent runs code, and no option says where."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.env import default_agent_harness

    is_placed = "runtime" in agent.model_fields_set
    runtime = agent.runtime if is_placed else vf.SubprocessConfig()
    harness = agent.harness or default_agent_harness(taskset_id)
    is_open = agent.harness is None and harness.id == "bash"
    if (is_open or harness.id == "null") and isinstance(runtime, vf.SubprocessConfig):
        harness = vf.HarnessConfig(**{**harness.model_dump(exclude_unset=True), "id": _CHAT})
    if not is_placed and vf.load_harness(harness).EXECUTES_CODE:
        how = f"{name}.runtime.type (docker, prime, ..., or subprocess for this machine)"
        raise ValueError(f"the harness {harness.id} runs code of the policy: say where by {how}")
    return agent.model_copy(update={"runtime": runtime, "harness": harness})


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> nested({"taskset.split": "test", "agent.max_turns": 4, "agent.model": "m"})
    {'taskset': {'split': 'test'}, 'agent': {'max_turns': 4, 'model': 'm'}}
    """
    result: dict[str, Any] = {}
    for name, value in options.items():
        *outer, last = name.split(".")
        inner = result
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return result


def tasks(environment: vf.Env, most: int | None) -> list[Any]:
    """The data of the first ``most`` tasks of the taskset (None: of all). ValueError: they never
    end, and ``most`` is None."""
    taskset = environment.taskset
    if most is None and not taskset.bounded:
        raise ValueError("its tasks never end; give task.num_problems")
    chosen = taskset if most is None else taskset.take(most)
    return [task.data.model_dump(mode="json", exclude_defaults=True) for task in chosen]


class Worker:
    """Runs rollouts, all requested ones at the same time."""

    def __init__(self, environment: vf.Env, answers: TextIO) -> None:
        self._environment = environment
        self._answers = answers
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}

    async def serve(self) -> None:
        """Run rollouts until the end of stdin."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(self._take, json.loads(line))
            loop.call_soon_threadsafe(ended.set)
            time.sleep(_CLOSING_S)
            os._exit(1)  # the environment does not close

        async with self._environment.serving():
            self._answers.write("{}\n")  # the environment has started
            threading.Thread(target=read, daemon=True).start()
            await ended.wait()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _take(self, request: Mapping[str, Any]) -> None:
        number = request["id"]
        if "task" in request:
            task = asyncio.create_task(run(self._environment, request))
            self._running[number] = task
            task.add_done_callback(partial(self._answer, number))
        elif number in self._running:
            self._running[number].cancel()

    def _answer(self, number: int, task: asyncio.Task[dict[str, Any]]) -> None:
        """Write a rollout's result. Called once per task, even if it is cancelled at once."""
        del self._running[number]
        if task.cancelled():
            answer: dict[str, Any] = {"error": "cancelled"}
        elif error := task.exception():
            answer = {"error": one_line(error)}
        else:
            answer = task.result()
        self._answers.write(json.dumps({"id": number, **answer}) + "\n")


async def run(environment: vf.Env, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one rollout, which is an episode of the environment."""
    import verifiers.v1 as vf

    key, session = request["api_key"].split(":")
    os.environ[_KEY] = key
    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=_KEY)
    context = vf.ModelContext(model=request["model"], client=client)
    task_type = type(environment.taskset).task_type()
    data = task_type.data_type().model_validate(request["task"])
    task = task_type(data, environment.config.taskset.task)
    traces: list[vf.Trace] = []

    def name(trace: vf.Trace) -> None:
        traces.append(trace)
        if trace.agent.trainable:
            trace.id = f"{session}.{len(traces)}"

    (slot,) = environment.slots(task)
    try:
        episode = await environment.run_slot(slot, context, on_trace=name)
    finally:
        untrained = [trace.id for trace in traces if not trace.agent.trainable]
        if untrained:
            await close_sessions(untrained, request["base_url"], key)
    return outcome(episode, is_valid=environment.complete(episode))


async def close_sessions(names: Sequence[str], base_url: str, key: str) -> None:
    """Close the sessions of agents that are not trained. The endpoint records a session until the
    session is closed."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, verify=False) as http:
        for name in names:
            await http.delete(f"{base_url}/sessions/{name}")


def outcome(episode: vf.Episode, *, is_valid: bool) -> dict[str, Any]:
    """The reward and metrics of an episode: means over the traces of the agents that are trained.
    If there are several such traces, ``part_rewards`` has the reward of each."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not is_valid:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {"error": shortened(f"{errors[-1].type}: {errors[-1].message}" if errors else "?")}
    if not trained:
        return {"error": "the episode has no agent that is trained"}
    values: dict[str, list[float]] = {}
    for trace in trained:
        own = {name: value for name, value in trace.metrics.items() if value is not None}
        scores = {f"reward/{name}": part.score for name, part in trace.rewards.items() if part}
        for name, value in {**own, **scores, "truncated": float(trace.is_truncated)}.items():
            values.setdefault(name, []).append(value)
    parts = {trace.id.rpartition(".")[2]: trace.reward for trace in trained if trace.rewards}
    from verifiers.v1.dialects.chat import message_to_wire

    return {
        "part_rewards": parts if len(trained) > 1 else {},
        "reward": fmean(trace.reward for trace in trained) if trained[-1].rewards else None,
        "metrics": {name: fmean(of_traces) for name, of_traces in values.items()},
        "messages": [message_to_wire(message) for message in trained[-1].messages],
    }


def one_line(error: BaseException) -> str:
    return shortened(f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    return " ".join(_ADVICE.sub("", text).split())[:_ERROR_CHARS]


if __name__ == "__main__":
    main()
