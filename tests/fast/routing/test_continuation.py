"""Completions that are sampled in pieces, against the same completions undisturbed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.async_tests import on_event_loop
from tests.support.replicas import GatedReplica, settle
from tests.support.scripted_engine import (
    ScriptedEngine,
    scripted_experts,
    scripted_text,
    scripted_token,
)
from torchtitan_rl.errors import InvalidRequestError, ReplicaError
from torchtitan_rl.routing.continuation import continued_seed, join, remaining_request, used_up
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    KeptRun,
    OnProgress,
    Progress,
    RoutedExperts,
    SamplingParams,
    VersionRun,
)

VOCAB, EOS = 40, 7


class CutReplica(GatedReplica):
    """A scripted engine that is cut: its n-th call ends after ``cuts[n]`` tokens (aborted), or, if
    negative, by the loss of the replica. The version goes up with each call that was cut if it
    ``moves_on``. Every ``every`` tokens are reported."""

    def __init__(
        self, name: str, cuts: list[int], *, moves_on: bool = False, every: int = 2
    ) -> None:
        super().__init__(name)
        self.cuts, self.moves_on, self.every = cuts, moves_on, every
        self.requests: list[GenerationRequest] = []

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        await asyncio.sleep(0)
        self.requests.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        name, version = request.request_id, self.version
        engine = ScriptedEngine(
            vocab_size=VOCAB, eos_token_id=EOS, version=version, has_experts=True
        )
        engine.add_request(request, arrival_s=0.0)
        ended: list[Completion] = []
        count = 0
        while not ended:
            if cut is not None and count == abs(cut):
                if cut < 0:
                    raise ReplicaError(f"{self.name} died")
                ended = engine.abort((name,))
                self.version += self.moves_on
                break
            ended, count = engine.step(), count + 1
            if not ended and count % self.every == 0 and on_progress is not None:
                (news,) = engine.sampled_since({name: count - self.every})
                on_progress(replace(news, version_runs=(VersionRun(0, version),)))
        (output,) = ended
        return replace(
            output,
            version_runs=(VersionRun(0, version),) if output.token_ids else (),
            metrics=None,
            replica=self.name,
        )


def generation(max_tokens: int, **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="id",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )


def complete(
    request: GenerationRequest, cuts: list[int], *, moves_on: bool = False
) -> tuple[Completion, CutReplica]:
    replica = CutReplica("r", list(cuts), moves_on=moves_on)
    return asyncio.run(GeneratorRouter([replica]).generate(request)), replica


def followed(
    replicas: list[CutReplica], request: GenerationRequest
) -> tuple[Completion, list[Progress]]:
    """The completion, and the progress that its caller heard."""
    heard: list[Progress] = []

    async def scenario() -> Completion:
        done = await GeneratorRouter(replicas).generate(request, heard.append)
        num_heard = len(heard)
        await settle()
        assert len(heard) == num_heard  # no progress comes after the completion
        return done

    return asyncio.run(scenario()), heard


def piece(*tokens: int, version: int = 0, reason: FinishReason = FinishReason.ABORT) -> Completion:
    return Completion(
        request_id="piece",
        token_ids=tokens,
        logprobs=tuple(-float(token) for token in tokens),
        version_runs=(VersionRun(0, version),) if tokens else (),
        finish_reason=reason,
    )


def routed(num_tokens: int) -> RoutedExperts:
    return RoutedExperts(data=bytes(3 * num_tokens), num_layers=1, per_token=3)


sampled = st.builds(
    generation,
    st.integers(1, 30),
    min_tokens=st.integers(0, 1),
    stop_token_ids=st.sampled_from([(), (11,), (11, 12)]),
    stop=st.sampled_from([(), ("ab",), ("f", "gh", "i")]),
    num_logprobs=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.9]),
    ignore_eos=st.booleans(),
)
cut_lists = st.lists(st.integers(0, 12), max_size=8)


@settings(max_examples=50)
@given(request=sampled, cuts=cut_lists)
def test_cut_anywhere_any_number_of_times_it_equals_the_undisturbed_completion(request, cuts):
    undisturbed, _ = complete(request, [])
    joined, replica = complete(request, cuts)
    assert joined == undisturbed
    ids = [one.request_id for one in replica.requests]
    assert len(set(ids)) == len(ids)
    assert all(one.resume_from is None for one in replica.requests)


@given(request=sampled, cuts=cut_lists, routed_from=st.integers(0, 2))
def test_each_token_of_a_cut_completion_has_the_version_it_was_sampled_under(
    request, cuts, routed_from
):
    request = replace(request, routed_from=routed_from)
    joined, replica = complete(request, cuts, moves_on=True)
    context = list(request.prompt_token_ids)
    for token, logprob, version in zip(
        joined.token_ids, joined.logprobs, joined.versions, strict=True
    ):
        expected = scripted_token(context, seed=None, version=version, vocab_size=VOCAB)
        assert (token, logprob) == expected
        before = scripted_experts(context[-1], len(context) - 1, version)
        index = len(context) - 1 - routed_from
        assert joined.routed_experts.part(index, index + 1).data == before
        context.append(token)
    assert joined.routed_experts.num_tokens == len(context) - 1 - routed_from
    for piece in replica.requests:  # the experts that an earlier piece has are not sent again
        num_resumed = piece.num_resumed
        assert piece.routed_from == (2 + num_resumed if num_resumed else routed_from)
    starts = [run.start for run in joined.version_runs]
    assert starts == sorted(set(starts))


@given(request=sampled, kept=st.integers(0, 30))
def test_what_is_resumed_from_a_record_equals_the_undisturbed_completion(request, kept):
    undisturbed, _ = complete(request, [])
    partial, _ = complete(replace(request, sampling=request.sampling), [])
    kept = min(kept, len(partial.token_ids) - 1)
    record = replace(
        partial,
        token_ids=partial.token_ids[:kept],
        logprobs=partial.logprobs[:kept],
        version_runs=partial.version_runs if kept else (),
        finish_reason=FinishReason.ABORT,
        stop_reason=None,
        top_logprobs=partial.top_logprobs[:kept],
        kept_tokens=tuple(run for run in partial.kept_tokens if run.start < kept),
        routed_experts=partial.routed_experts.part(0, 3 + kept - 1) if kept else None,
    )
    resumed, replica = complete(replace(request, resume_from=record), [])
    assert resumed == undisturbed
    assert sum(one.sampling.max_tokens for one in replica.requests) == (
        request.sampling.max_tokens - kept
    )


@settings(max_examples=40)
@given(
    request=sampled,
    cuts=st.lists(st.integers(-9, 9), max_size=5),
    every=st.integers(1, 4),
)
def test_through_cuts_and_losses_progress_is_a_beginning_of_the_undisturbed_completion(
    request, cuts, every
):
    undisturbed, _ = complete(request, [])
    calls = list(cuts)  # of all replicas together, in order
    replicas = [CutReplica(f"r{n}", calls, every=every) for n in range(len(cuts) + 1)]
    done, heard = followed(replicas, request)
    assert replace(done, replica="r") == undisturbed
    told: list[int] = []
    for progress in heard:
        start, end = len(told), len(told) + len(progress.token_ids)
        assert (progress.request_id, progress.start) == ("id", start)
        assert progress.logprobs == done.logprobs[start:end]
        assert progress.top_logprobs == done.top_logprobs[start:end]
        assert progress.routed_experts is None
        told += progress.token_ids
    assert tuple(told) == done.token_ids[: len(told)]
    assert len(told) >= len(done.token_ids) - every


def test_trap_5_progress_after_a_cut_has_the_versions_of_all_tokens_so_far():
    done, heard = followed([CutReplica("r", [4], moves_on=True)], generation(9, ignore_eos=True))
    assert done.version_runs == (VersionRun(0, 0), VersionRun(4, 1))
    for one in heard:
        end = one.start + len(one.token_ids)
        assert one.version_runs == tuple(run for run in done.version_runs if run.start < end)
    assert heard[-1].start > 4


def test_a_lost_replica_costs_only_the_tokens_since_the_last_report():
    replicas = [CutReplica("dies", [-7], every=3), CutReplica("alive", [])]
    followed(replicas, generation(10, ignore_eos=True))
    assert len(replicas[1].requests[0].prompt_token_ids) == 3 + 6


def test_progress_of_a_piece_that_is_over_is_not_taken_for_that_of_the_next():
    class Late(CutReplica):
        async def generate(self, request, on_progress=None, *, streams=False):
            if self.requests:
                stale = Progress(
                    request_id="id", start=2, token_ids=(99,), logprobs=(0.0,), version_runs=()
                )
                on_progress(stale)
            return await super().generate(request, on_progress, streams=streams)

    done, heard = followed([Late("r", [4])], generation(8, ignore_eos=True))
    told = [token for one in heard for token in one.token_ids]
    assert tuple(told) == done.token_ids[: len(told)]


def test_the_experts_that_a_lost_replica_reported_are_kept():
    lost, next_one = CutReplica("r0", [-5]), CutReplica("r1", [])
    next_one.version = 1
    done, _ = followed([lost, next_one], generation(9, ignore_eos=True))
    versions = [done.routed_experts.part(i, i + 1).data[2] - 150 for i in range(11)]
    assert done.versions == (0, 0, 0, 0, 1, 1, 1, 1, 1)
    assert versions == [0] * 6 + [1] * 5  # the fourth token was sampled from the third


def test_progress_of_a_resumed_request_starts_after_the_tokens_that_it_brought():
    request = generation(9, ignore_eos=True)
    undisturbed, _ = complete(request, [])
    brought = replace(
        undisturbed,
        token_ids=undisturbed.token_ids[:3],
        logprobs=undisturbed.logprobs[:3],
        finish_reason=FinishReason.ABORT,
        routed_experts=undisturbed.routed_experts.part(0, 5),
    )
    replica = CutReplica("r", [4])
    done, heard = followed([replica], replace(request, resume_from=brought))
    assert done == undisturbed
    assert heard[0].start == 3
    assert [len(one.prompt_token_ids) for one in replica.requests] == [6, 10]


@given(
    pieces=st.lists(
        st.builds(
            lambda tokens, version: piece(*tokens, version=version),
            st.lists(st.integers(0, 5), max_size=4),
            st.integers(0, 2),
        ),
        max_size=6,
    ),
    cut=st.integers(0, 6),
)
def test_joining_does_not_depend_on_where_it_was_joined_before(pieces, cut):
    whole = join("id", pieces)
    assert join("id", [join("id", pieces[:cut]), join("id", pieces[cut:])]) == whole
    assert whole.versions == tuple(version for one in pieces for version in one.versions)


def test_trap_7_a_budget_used_up_exactly_ends_by_length_without_another_request():
    joined, replica = complete(generation(5, ignore_eos=True), [2, 3])
    assert joined.finish_reason is FinishReason.LENGTH
    assert [one.sampling.max_tokens for one in replica.requests] == [5, 3]
    aborted = piece(1, 2, 3, 4, 5)
    assert remaining_request(generation(5), aborted) is None
    assert used_up(aborted).finish_reason is FinishReason.LENGTH


def test_trap_7_shared_sampling_parameters_are_never_changed():
    request = generation(9, min_tokens=4, seed=1)
    before = replace(request.sampling)
    rest = remaining_request(request, piece(1, 2, 3), attempt=2)
    assert rest is not None
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (6, 1)
    assert (rest.request_id, rest.prompt_token_ids) == ("id#2", (1, 2, 3, 1, 2, 3))
    assert request.sampling == before


def test_trap_8_a_stop_string_that_straddles_cuts_stops_at_the_token_that_completes_it():
    request = generation(30, ignore_eos=True)
    undisturbed, _ = complete(request, [])
    stop = scripted_text(undisturbed.token_ids[8:12])
    for cuts in ([9], [10], [11], [9, 1, 1]):
        stopped, replica = complete(
            replace(request, sampling=replace(request.sampling, stop=(stop,))), cuts
        )
        assert stopped.token_ids == undisturbed.token_ids[:12]
        assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
        assert [one.num_resumed for one in replica.requests[:2]] == [0, cuts[0]]


def test_trap_9_a_cut_before_the_first_token_leaves_the_request_as_it_was():
    request = generation(9, seed=1)
    assert remaining_request(request, piece()) == request


def test_trap_8_a_seeded_request_goes_on_with_a_seed_of_its_own_that_is_always_the_same():
    request = generation(20, seed=3, ignore_eos=True)
    once, replica = complete(request, [4, 4])
    again, _ = complete(request, [4, 4])
    assert once == again
    seeds = [one.sampling.seed for one in replica.requests]
    assert len(set(seeds)) == 3
    assert seeds[1] == continued_seed(3, once.token_ids[:4])
    assert continued_seed(3, (1, 2)) == 3406039206462273791
    assert continued_seed(-3, (1, 2)) not in (3406039206462273791, continued_seed(-4, (1, 2)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (piece(*range(6)), "it has 6 tokens, and sampling.max_tokens = 5"),
        (replace(piece(1, 2), logprobs=(-1.0,)), "2 tokens and 1 logprobs"),
        (replace(piece(1, 2), version_runs=()), "version runs start at"),
        (replace(piece(1, 2), top_logprobs=(((1, -1.0),),)), "alternatives for 1 tokens instead"),
        (replace(piece(1), kept_tokens=(KeptRun(1, b""),)), r"kept tokens start at \[1\], for 1"),
        (replace(piece(1), version_runs=(VersionRun(0, 1), VersionRun(3, 2))), "start at"),
        (replace(piece(1), routed_experts=routed(4)), "experts are of 4 tokens, for 1 sampled"),
        (replace(piece(1, 2), routed_experts=routed(1)), "experts are of 1 tokens, for 2 sampled"),
        (replace(piece(1), routed_experts=replace(routed(1), per_token=2)), "have 3 bytes, for 1"),
    ],
)
def test_a_record_that_cannot_be_of_this_request_is_refused(record, message):
    with pytest.raises(InvalidRequestError, match=message):
        complete(replace(generation(5), resume_from=record), [])


@on_event_loop
async def test_an_abort_that_the_caller_asked_for_is_not_continued():
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica])
    await router.pause(mode="abort")
    call = asyncio.create_task(router.generate(generation(5)))
    await asyncio.sleep(0)
    await router.abort(["id", "unknown"])
    done = await call
    assert (done.finish_reason, done.token_ids) == (FinishReason.ABORT, ())
    assert replica.served == []
