from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.endpoints import completion, request
from torchtitan_rl.channel import Call
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.failures import Failure
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import Command
from torchtitan_rl.serving.restarts import EndpointRestarts
from torchtitan_rl.serving.runs import ClientCall, Runs
from torchtitan_rl.types import TokenScores

KEY = "c0ffee"
NAME = "chatcmpl-name-0123abcd"


def generation(run: str, request_id: str = NAME, *, max_tokens: int = 4) -> Call[Any]:
    payload = request(request_id, max_tokens=max_tokens)
    return Call(call_id=request_id, payload=payload, run=f"{KEY}-{run}")


def started(runs: Runs, call: Call[Any]) -> ClientCall:
    one = ClientCall.of(call)
    one.task = asyncio.get_running_loop().create_future()
    runs.add(one)
    return one


def end(runs: Runs, call: ClientCall, result: Any) -> None:
    call.task.set_result(result)
    runs.end(call, result)


@on_virtual_clock
async def test_the_run_that_its_client_most_likely_missed_is_taken_first_and_each_once() -> None:
    runs = Runs()
    for name in ("old", "running", "new"):
        call = started(runs, generation(name))
        await asyncio.sleep(1.0)
        if name != "running":
            end(runs, call, completion("inner"))
    assert runs.take(KEY) == {}  # no process was lost
    runs.lose_process()
    taken = [runs.take(KEY) for _ in range(4)]
    assert [one.get("run", "") for one in taken] == [
        f"{KEY}-running",
        f"{KEY}-new",
        f"{KEY}-old",
        "",
    ]
    assert taken[0]["request_id"] == "name"
    runs.lose_process()
    assert runs.take(KEY)["run"] == f"{KEY}-running"  # the process that took it was lost, too


@on_virtual_clock
async def test_only_a_call_of_the_same_run_with_the_same_payload_is_adopted_and_once() -> None:
    runs = Runs()
    call = started(runs, generation("a"))
    assert runs.adopt(generation("a", "again")) is None  # its process lives: another choice of n
    runs.lose_process()
    assert runs.adopt(generation("b", "again")) is None
    assert runs.adopt(generation("a", "again", max_tokens=5)) is None
    assert runs.adopt(generation("a", "again")) is call
    assert call.call_id == "again"
    assert runs.adopt(generation("a", "again")) is None
    reward = Call(call_id=1, payload=Command(name="session.close"), run=f"{KEY}-c")
    closing = started(runs, reward)
    runs.lose_process()
    assert runs.adopt(reward) is closing


@on_virtual_clock
async def test_answers_beyond_the_bound_are_refused_and_failed_calls_forgotten() -> None:
    runs = Runs(max_values=10)
    calls = [started(runs, generation(name)) for name in ("a", "b", "c")]
    for call in calls:
        end(runs, call, completion("inner", 4))
    failed = started(runs, generation("d"))
    runs.end(failed, None)
    runs.lose_process()
    assert runs.adopt(generation("d")) is None
    oldest = runs.adopt(generation("a"))
    assert oldest is not None
    with pytest.raises(RefusedError, match="not run again"):
        oldest.task.result()
    kept = runs.adopt(generation("b"))
    assert kept is not None
    assert kept.task.result().token_ids == (0, 1, 2, 3)


@on_virtual_clock
async def test_all_that_is_kept_of_a_call_counts_or_is_small() -> None:
    runs = Runs(max_values=10_000)
    options = {"structured_outputs": {"grammar": "x" * 1_000_000}}
    payload = replace(request(NAME).sampling, engine_options=options)
    large = Call(call_id="a", payload=replace(request(NAME), sampling=payload), run=f"{KEY}-large")
    assert len(started(runs, large).payload) < 100
    scores = TokenScores(logprobs=(0.0,), top_ids=bytes(400_000), top_logprobs=bytes(400_000))
    for result in ("x" * 1_000_000, replace(completion("inner"), prompt_scores=scores)):
        call = started(runs, generation(f"result-{type(result).__name__}"))
        end(runs, call, result)
        assert call.task.exception() is not None  # over the bound, so it is dropped


@on_virtual_clock
async def test_ended_runs_are_forgotten_after_a_while_and_running_ones_are_not() -> None:
    runs = Runs(keep_s=900.0)
    running = started(runs, generation("running"))
    end(runs, started(runs, generation("ended")), completion("inner"))
    await asyncio.sleep(901.0)
    started(runs, generation("new"))
    runs.lose_process()
    assert runs.adopt(generation("ended")) is None
    assert runs.adopt(generation("running")) is running


class Starting:
    """Starts, unless it is told not to."""

    name = "endpoint"
    fails = 0

    async def restart(self) -> None:
        await asyncio.sleep(1.0)

    async def start(self) -> None:
        self.fails -= 1
        if self.fails >= 0:
            raise EndpointLostError("the server cannot be built")


@on_virtual_clock
async def test_restarts_are_counted_anew_after_ten_minutes_of_service() -> None:
    failures: list[Failure] = []
    endpoint: Any = Starting()
    restarts = EndpointRestarts(max_restarts=2, say=print, on_failure=failures.append)
    lost = EndpointLostError("killed")
    for _ in range(3):
        await restarts.restart(endpoint, lost)
        endpoint.fails = 1  # the next time the first attempt fails
        await asyncio.sleep(601.0)
    endpoint.fails = 0
    for _ in range(2):
        report = await restarts.restart(endpoint, lost)
        assert (report.restart_s, report.serve_s) == (1.0, 1.0)
    assert not failures  # those that serve again are reported with what was repeated
    with pytest.raises(EndpointLostError, match=r"killed; .*after 2 restarts in a row"):
        await restarts.restart(endpoint, lost)
    assert [one.given_up for one in failures] == ["after 2 restarts in a row"]
