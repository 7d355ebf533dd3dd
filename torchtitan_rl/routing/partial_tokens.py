"""The tokens of one request while it is completed in pieces, and their reports to its caller.

Invariants: the partial completion never shrinks; the tokens reported to the caller are its
beginning, each reported once and in order, in whatever pieces they came; a reported token is never
lost with a replica.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl.generation.versions import join_runs
from torchtitan_rl.routing.continuation import join, reported
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress


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
        start, ended = self._num_reported, self._ended
        if start < len(ended.token_ids):
            unreported = Progress(
                request_id=self._request_id,
                start=start,
                token_ids=ended.token_ids[start:],
                logprobs=ended.logprobs[start:],
                version_runs=ended.version_runs,
                top_logprobs=ended.top_logprobs[start:],
            )
            self._report(unreported)

    def add_progress(self, progress: Progress) -> None:
        """Take the running piece's progress; that of any other piece is ignored."""
        if progress.request_id != self.piece_id:
            return
        self._piece.append(progress)
        num_before = len(self._ended.token_ids)
        runs = join_runs(self._ended.version_runs, progress.version_runs, length=num_before)
        self._report(replace(progress, version_runs=runs))

    def end_piece(self, done: Completion) -> None:
        self._ended = join(self._request_id, [self._ended, done])
        self.piece_id, self._piece = None, []

    def lose_piece(self) -> int:
        """End the piece of a lost replica, keeping its reported tokens; returns their number."""
        num_before = len(self._ended.token_ids)
        self.end_piece(reported(self._request_id, self._piece))
        return len(self._ended.token_ids) - num_before

    def _report(self, progress: Progress) -> None:
        """Report the next tokens; a caller that follows them has no use for the kept tokens."""
        if self._on_progress is None:
            return
        start = self._num_reported
        self._num_reported += len(progress.token_ids)
        self._on_progress(
            replace(progress, request_id=self._request_id, start=start, kept_tokens=())
        )
