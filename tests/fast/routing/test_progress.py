"""Progress through the router: of the whole completion, whatever pieces it came in."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.async_tests import on_event_loop
from tests.support.replicas import GatedReplica, request, settle
from tests.support.scripted_engine import scripted_kept
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.generation.commands import EngineCommand
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.token_sets import kept_runs
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    FinishReason,
    GenerationRequest,
    KeptRun,
    OnProgress,
    Progress,
    TopLogprobs,
    VersionRun,
)


class TellingReplica(GatedReplica):
    """Samples the position of each token in prompt + completion and tells every ``every`` of them.

    Its n-th call ends after ``cuts[n]`` tokens: aborted, or lost where that is negative. Versions
    go up by one every 3 positions, so that what was sampled shows whether it was shifted right.
    """

    def __init__(self, name: str, cuts: list[int], every: int = 2) -> None:
        super().__init__(name)
        self.cuts, self.every = cuts, every
        self.calls: list[tuple[int, bool]] = []  # length of the prompt, streams

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        self.calls.append((len(request.prompt_token_ids), streams))
        cut = self.cuts.pop(0) if self.cuts else None
        budget = request.sampling.max_tokens
        count = budget if cut is None else min(abs(cut), budget)
        first = len(request.prompt_token_ids)
        tokens = tuple(range(first, first + count))
        for start in range(0, count - self.every + 1, self.every):
            await asyncio.sleep(0)
            assert on_progress is not None
            on_progress(
                Progress(
                    request_id=request.request_id,
                    start=start,
                    token_ids=tokens[start : start + self.every],
                    logprobs=tuple(-float(t) for t in tokens[start : start + self.every]),
                    version_runs=runs(tokens[: start + self.every]),
                    top_logprobs=tops(tokens[start : start + self.every]),
                    kept_tokens=kept(tokens[start : start + self.every]),
                )
            )
        if cut is not None and cut < 0:
            raise ReplicaError(f"{self.name} died")
        return Completion(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=tuple(-float(t) for t in tokens),
            version_runs=runs(tokens),
            finish_reason=FinishReason.ABORT if count < budget else FinishReason.LENGTH,
            replica=self.name,
            top_logprobs=tops(tokens),
            kept_tokens=kept(tokens),
        )


def kept(tokens: tuple[int, ...]) -> tuple[KeptRun, ...]:
    return kept_runs(map(scripted_kept, tokens))


def tops(tokens: tuple[int, ...]) -> tuple[TopLogprobs, ...]:
    return tuple(((token, -float(token)),) for token in tokens)


def runs(tokens: tuple[int, ...]) -> tuple[VersionRun, ...]:
    starts = [i for i, t in enumerate(tokens) if i == 0 or t // 3 != tokens[i - 1] // 3]
    return tuple(VersionRun(i, tokens[i] // 3) for i in starts)


def complete(
    replicas: list[TellingReplica], item: GenerationRequest
) -> tuple[Completion, list[Progress]]:
    heard: list[Progress] = []

    async def scenario() -> Completion:
        done = await GeneratorRouter(replicas).generate(item, heard.append)
        num_heard = len(heard)
        await settle()
        assert len(heard) == num_heard  # nothing comes after the completion
        return done

    return asyncio.run(scenario()), heard


@settings(max_examples=40)
@given(
    cuts=st.lists(st.integers(min_value=-9, max_value=9), max_size=5),
    every=st.integers(min_value=1, max_value=4),
)
def test_progress_is_a_beginning_of_the_completion_however_it_was_cut(
    cuts: list[int], every: int
) -> None:
    losses = sum(cut < 0 for cut in cuts)
    calls = list(cuts)  # of all replicas together, in order
    replicas = [TellingReplica(f"r{n}", calls, every) for n in range(losses + 1)]
    done, heard = complete(replicas, request("a", prompt_len=4, max_tokens=30))
    assert done.token_ids == tuple(range(4, 34))
    assert done.version_runs == runs(done.token_ids)
    assert done.top_logprobs == tops(done.token_ids)
    assert done.kept_tokens == kept(done.token_ids)
    told: list[int] = []
    for progress in heard:
        assert progress.request_id == "a"
        assert progress.start == len(told)
        assert progress.token_ids
        told += progress.token_ids
        assert progress.logprobs == tuple(-float(t) for t in progress.token_ids)
        assert progress.version_runs == runs(tuple(told))
        assert progress.top_logprobs == tops(progress.token_ids)
    assert tuple(told) == done.token_ids[: len(told)]
    assert len(told) > 30 - every


@on_event_loop
async def test_a_lost_replica_costs_only_the_tokens_since_the_last_message() -> None:
    replicas = [TellingReplica("dies", [-7], every=3), TellingReplica("alive", [])]
    router = GeneratorRouter(replicas)
    done = await router.generate(request("a", prompt_len=4, max_tokens=10))
    assert done.token_ids == tuple(range(4, 14))
    assert [replica.calls for replica in replicas] == [[(4, False)], [(4 + 6, False)]]


def test_progress_of_a_piece_that_is_over_is_not_taken_for_that_of_the_next() -> None:
    class Late(TellingReplica):
        async def generate(
            self,
            request: GenerationRequest,
            on_progress: OnProgress | None = None,
            *,
            streams: bool = False,
        ) -> Completion:
            if self.calls and on_progress is not None:
                on_progress(stale)
            return await super().generate(request, on_progress, streams=streams)

    stale = Progress(
        request_id="a", start=2, token_ids=(99,), logprobs=(0.0,), version_runs=runs((4, 5, 6))
    )
    done, heard = complete([Late("r", [4])], request("a", prompt_len=4, max_tokens=8))
    assert [token for one in heard for token in one.token_ids] == list(done.token_ids)


def test_progress_of_a_resumed_request_starts_behind_what_it_brought() -> None:
    brought = Completion(
        request_id="a",
        token_ids=(4, 5, 6),
        logprobs=(-4.0, -5.0, -6.0),
        version_runs=runs((4, 5, 6)),
        finish_reason=FinishReason.ABORT,
    )
    item = request("a", prompt_len=4, max_tokens=9, resume_from=brought)
    replica = TellingReplica("r", [4])
    done, heard = complete([replica], item)
    assert done.token_ids == tuple(range(4, 13))
    assert heard[0].start == 3
    assert [token for one in heard for token in one.token_ids] == list(range(7, 13))
    assert replica.calls == [(7, True), (11, True)]


@on_event_loop
async def test_a_lost_replica_costs_only_the_tokens_since_they_were_last_read():
    class Reporting(GatedReplica):
        """Reports two tokens when it is read."""

        async def generate(self, request, on_progress=None, *, streams=False):
            self.on_progress = on_progress
            return await super().generate(request, on_progress, streams=streams)

        async def answer(self, command: EngineCommand[Any]) -> EngineReading:
            self.on_progress(
                Progress(
                    request_id="a",
                    start=0,
                    token_ids=(5, 6),
                    logprobs=(-1.0, -2.0),
                    version_runs=(VersionRun(0, 0),),
                )
            )
            return EngineReading(sampled_tokens=2, running_tokens=2)

    dying, other = Reporting("dying", is_open=False), GatedReplica("other")
    router = GeneratorRouter([dying, other])
    call = asyncio.create_task(router.generate(request("a", max_tokens=4)))
    await settle()
    assert (await router.partials())["a"].token_ids == (5, 6)
    dying.is_dead = True
    dying.gate.set()
    done = await call
    assert (done.request_id, done.token_ids) == ("a", (5, 6, 7, 7))
    assert other.served == ["a#1"]
