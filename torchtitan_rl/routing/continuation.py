"""Handles completions that are sampled in pieces: builds the request for the rest, and joins the
pieces.

No I/O and no state, except in `PartialTokens`. The tokens so far become part of the prompt, as
token ids, never as text. ``num_resumed`` says how many tokens at the prompt's end were sampled, so
that stop strings, penalties, minimum lengths and grammars continue as without the interruption. A
piece that ended by a stop is the last. A greedy continuation equals the uninterrupted run; a seeded
one is reproducible, but differs: its generator starts again from `continued_seed`.

Invariants of `PartialTokens`: the partial completion never shrinks. The tokens reported to the
caller are its beginning; each token is reported once, in order. A reported token is never lost with
a replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.routed_experts import join_routed, of_progress, routed_error
from torchtitan_rl.token_sets import join_kept, kept_after, kept_error, kept_of_each, kept_runs
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    FinishReason,
    GenerationRequest,
    OnProgress,
    Progress,
    join_runs,
)


def check_resumable(request: GenerationRequest) -> None:
    """Refuse a ``resume_from`` that cannot be the beginning of this request's completion. The
    replica checks that its tokens fit into the context. Raises InvalidRequestError: ``resume_from``
    does not fit. The message has the numbers."""
    so_far = request.resume_from
    if so_far is None:
        return
    num_tokens, most = len(so_far.token_ids), request.sampling.max_tokens
    errors = []
    if num_tokens > most:
        errors.append(f"it has {num_tokens} tokens, and sampling.max_tokens = {most}")
    if len(so_far.logprobs) != num_tokens:
        errors.append(f"it has {num_tokens} tokens and {len(so_far.logprobs)} logprobs")
    starts = [run.start for run in so_far.version_runs]
    is_in_order = all(a < b for a, b in pairwise(starts))
    if num_tokens and (not starts or starts[0] != 0 or starts[-1] >= num_tokens or not is_in_order):
        errors.append(f"its version runs start at {starts}, for {num_tokens} tokens")
    num_top, found = num_tokens if request.sampling.num_logprobs else 0, len(so_far.top_logprobs)
    if found != num_top:
        errors.append(f"it has alternatives for {found} tokens instead of {num_top}")
    if error := kept_error(so_far.kept_tokens, num_tokens):
        errors.append(f"its {error}")
    if error := routed_error(
        so_far.routed_experts, num_sampled=num_tokens, num_prompt=len(request.prompt_token_ids)
    ):
        errors.append(f"its {error}")
    if errors:
        raise InvalidRequestError(
            f"request {request.request_id!r} refused: resume_from is not the beginning of its "
            f"completion: {'; '.join(errors)}"
        )


def remaining_request(
    request: GenerationRequest, so_far: Completion | None, *, attempt: int = 0
) -> GenerationRequest | None:
    """Build the request for the tokens after ``so_far``; None if a piece ended by itself or the
    budget is used up. ``attempt`` is the number of earlier pieces; each has its own id on the
    engine."""
    request_id = f"{request.request_id}#{attempt}" if attempt else request.request_id
    tokens = so_far.token_ids if so_far is not None else ()
    if so_far is not None and so_far.finish_reason is not FinishReason.ABORT:
        return None
    if not (tokens or attempt or request.resume_from):
        return request
    sampling, routed_from = request.sampling, request.routed_from
    if so_far is not None and so_far.routed_experts is not None:
        routed_from = len(request.prompt_token_ids) + len(tokens) - 1
    if tokens:
        if len(tokens) >= sampling.max_tokens:
            return None
        sampling = replace(
            sampling,
            max_tokens=sampling.max_tokens - len(tokens),
            min_tokens=max(0, sampling.min_tokens - len(tokens)),
            seed=None if sampling.seed is None else continued_seed(sampling.seed, tokens),
        )
    return replace(
        request,
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids + tokens,
        sampling=sampling,
        resume_from=None,
        num_resumed=request.num_resumed + len(tokens),
        routed_from=routed_from,
    )


def continued_seed(seed: int, tokens: Sequence[int]) -> int:
    """Derive a seed from 0 to 2**63 - 1, the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for value in (seed, *tokens):
        digest.update(value.to_bytes(8, "little", signed=value < 0))
    return int.from_bytes(digest.digest(), "little") >> 1


def reported(request_id: str, progress: Sequence[Progress]) -> Completion:
    """Join consecutive progress reports to a completion that ends with ABORT."""
    kept = [kept for one in progress for kept in kept_of_each(one.kept_tokens, len(one.token_ids))]
    return Completion(
        request_id=request_id,
        token_ids=tuple(token for one in progress for token in one.token_ids),
        logprobs=tuple(logprob for one in progress for logprob in one.logprobs),
        version_runs=progress[-1].version_runs if progress else (),
        finish_reason=FinishReason.ABORT,
        top_logprobs=tuple(top for one in progress for top in one.top_logprobs),
        kept_tokens=kept_runs(kept) if any(one.kept_tokens for one in progress) else (),
        routed_experts=of_progress(progress),
    )


def join(request_id: str, pieces: Sequence[Completion]) -> Completion:
    """Join the pieces, in order, to one completion with the finish reason and replica of the last
    one; without pieces, to one without tokens that ends with ABORT."""
    joined = Completion(
        request_id=request_id,
        token_ids=(),
        logprobs=(),
        version_runs=(),
        finish_reason=FinishReason.ABORT,
    )
    for piece in pieces:
        joined = _append(joined, piece)
    return joined


def used_up(so_far: Completion) -> Completion:
    """Return the final completion of a request for which `remaining_request` returned None."""
    if so_far.finish_reason is not FinishReason.ABORT:
        return so_far
    return replace(so_far, finish_reason=FinishReason.LENGTH)


def _append(joined: Completion, piece: Completion) -> Completion:
    runs, kept, length = joined.version_runs, joined.kept_tokens, len(joined.token_ids)
    if piece.token_ids:
        runs = join_runs(runs, piece.version_runs, length=length)
        kept = join_kept(kept, piece.kept_tokens, length=length)
    return replace(
        piece,
        request_id=joined.request_id,
        token_ids=joined.token_ids + piece.token_ids,
        logprobs=joined.logprobs + piece.logprobs,
        version_runs=runs,
        metrics=_append_metrics(joined, piece),
        replica=piece.replica or joined.replica,
        top_logprobs=joined.top_logprobs + piece.top_logprobs,
        kept_tokens=kept,
        prompt_scores=joined.prompt_scores or piece.prompt_scores,
        routed_experts=join_routed(
            joined.routed_experts, piece.routed_experts, num_sampled=len(piece.token_ids)
        ),
    )


def _append_metrics(joined: Completion, piece: Completion) -> CompletionMetrics | None:
    """Add up the times on replicas, without the time between two pieces. The wait of a later piece
    for its first token counts as decoding."""
    first, second = joined.metrics, piece.metrics
    if first is None or second is None:
        return second or first
    decode_s, first_token_s = first.decode_s + second.decode_s, first.time_to_first_token_s
    if not joined.token_ids:
        first_token_s += second.time_to_first_token_s
    elif piece.token_ids:
        decode_s += second.time_to_first_token_s
    num_intervals = len(joined.token_ids) + len(piece.token_ids) - 1
    return CompletionMetrics(
        queue_s=first.queue_s + second.queue_s,
        time_to_first_token_s=first_token_s,
        decode_s=decode_s,
        inter_token_latency_s=decode_s / num_intervals if num_intervals > 0 else 0.0,
        cached_tokens=first.cached_tokens if joined.token_ids else second.cached_tokens,
        requests_in_flight=second.requests_in_flight,
    )


class PartialTokens:
    """The tokens of one request so far. ``on_progress`` is called with the tokens after those of
    ``resume_from``. ``ended`` is the completion of all pieces that have ended."""

    def __init__(self, request: GenerationRequest, on_progress: OnProgress | None = None) -> None:
        self._request_id = request.request_id
        self._on_progress = on_progress
        self.ended = join(self._request_id, [request.resume_from] if request.resume_from else [])
        self._num_reported = self._num_resumed = len(self.ended.token_ids)
        self.piece_id: str | None = None  # the running piece's id on its engine
        self._piece: list[Progress] = []

    @property
    def streams(self) -> bool:
        return self._on_progress is not None

    @property
    def num_sampled(self) -> int:
        """Number of tokens in all pieces that have ended, without ``resume_from``."""
        return len(self.ended.token_ids) - self._num_resumed

    @property
    def partial(self) -> Completion:
        """The completion of all ended pieces and of the running piece's reported tokens."""
        if not self._piece:
            return self.ended
        return _append(self.ended, reported(self._request_id, self._piece))

    def start_piece(self, piece_id: str) -> None:
        """Begin a piece. Unreported tokens of earlier pieces are reported first."""
        self.piece_id = piece_id
        start, ended = self._num_reported, self.ended
        if start < len(ended.token_ids):
            self._report(
                Progress(
                    request_id=self._request_id,
                    start=start,
                    token_ids=ended.token_ids[start:],
                    logprobs=ended.logprobs[start:],
                    version_runs=ended.version_runs,
                    top_logprobs=ended.top_logprobs[start:],
                    kept_tokens=kept_after(ended.kept_tokens, start, length=len(ended.token_ids)),
                )
            )

    def add_progress(self, progress: Progress) -> None:
        """Add the running piece's progress. Progress of any other piece is ignored."""
        if progress.request_id != self.piece_id:
            return
        self._piece.append(progress)
        num_before = len(self.ended.token_ids)
        runs = join_runs(self.ended.version_runs, progress.version_runs, length=num_before)
        self._report(replace(progress, version_runs=runs))

    def end_piece(self, done: Completion) -> None:
        self.ended = _append(self.ended, done)
        self.piece_id, self._piece = None, []

    def lose_piece(self) -> int:
        """End the piece of a lost replica, and keep its reported tokens. Returns their number."""
        num_before = len(self.ended.token_ids)
        self.end_piece(reported(self._request_id, self._piece))
        return len(self.ended.token_ids) - num_before

    def _report(self, progress: Progress) -> None:
        if self._on_progress is None:
            return
        # Callers that follow progress do not use the experts.
        start = self._num_reported
        self._num_reported += len(progress.token_ids)
        self._on_progress(
            replace(progress, request_id=self._request_id, start=start, routed_experts=None)
        )
