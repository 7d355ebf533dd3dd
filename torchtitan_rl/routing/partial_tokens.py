"""The tokens of one request while it is completed in pieces, and their reports to its caller.

Invariants: the partial completion never shrinks; the tokens reported to the caller are its
beginning, each reported once and in order, in whatever pieces they came; a reported token is never
lost with a replica.
"""

from __future__ import annotations

from torchtitan_rl.generation.versions import join_runs
from torchtitan_rl.routing.continuation import join, reported
from torchtitan_rl.types import (
    Completion,
    GenerationRequest,
    OnProgress,
    Progress,
    TopLogprobs,
    VersionRun,
)


class PartialTokens:
    """``on_progress`` gets the tokens after those of ``resume_from``."""

    def __init__(self, request: GenerationRequest, on_progress: OnProgress | None = None) -> None:
        self._request_id = request.request_id
        self._on_progress = on_progress
        self._ended = join(self._request_id, [request.resume_from] if request.resume_from else [])
        self._num_reported = self._num_resumed = len(self._ended.token_ids)
        self.piece_id: str | None = None  # of the running piece, on its engine
        self._piece: list[Progress] = []

    @property
    def streams(self) -> bool:
        return self._on_progress is not None

    @property
    def ended(self) -> Completion:
        """All pieces that have ended."""
        return self._ended

    @property
    def num_sampled(self) -> int:
        """Tokens of all pieces that have ended."""
        return len(self._ended.token_ids) - self._num_resumed

    @property
    def partial(self) -> Completion:
        """`ended`, and the reported tokens of the running piece."""
        if not self._piece:
            return self._ended
        piece = reported(self._request_id, self._piece)
        return join(self._request_id, [self._ended, piece])

    def start_piece(self, piece_id: str) -> None:
        """Begin a piece; tokens of earlier ones that were not reported are reported first."""
        self.piece_id = piece_id
        start = self._num_reported
        if start < len(self._ended.token_ids):
            self._report(
                self._ended.token_ids[start:],
                self._ended.logprobs[start:],
                self._ended.version_runs,
                self._ended.top_logprobs[start:],
            )

    def add_progress(self, progress: Progress) -> None:
        """Take the running piece's progress; that of any other piece is ignored."""
        if progress.request_id != self.piece_id:
            return
        self._piece.append(progress)
        num_before = len(self._ended.token_ids)
        runs = join_runs(self._ended.version_runs, progress.version_runs, length=num_before)
        self._report(progress.token_ids, progress.logprobs, runs, progress.top_logprobs)

    def end_piece(self, done: Completion) -> None:
        self._ended = join(self._request_id, [self._ended, done])
        self.piece_id, self._piece = None, []

    def lose_piece(self) -> int:
        """End the piece of a lost replica, keeping its reported tokens; returns their number."""
        num_before = len(self._ended.token_ids)
        self.end_piece(reported(self._request_id, self._piece))
        return len(self._ended.token_ids) - num_before

    def _report(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        runs: tuple[VersionRun, ...],
        top_logprobs: tuple[TopLogprobs, ...],
    ) -> None:
        if self._on_progress is None:
            return
        progress = Progress(
            request_id=self._request_id,
            start=self._num_reported,
            token_ids=token_ids,
            logprobs=logprobs,
            version_runs=runs,
            top_logprobs=top_logprobs,
        )
        self._num_reported += len(token_ids)
        self._on_progress(progress)
