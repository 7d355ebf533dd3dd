"""The report of a session: its exact turns, its episodes, and the account of its tokens.

Invariant: tokens generated = trained + masked by rule + discarded by a named cause + pending (only
while the session is open). Turns are in the order in which their requests began.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from torchtitan_rl.files import append_line, open_for_append
from torchtitan_rl.token_sets import kept_of_each, kept_to_json
from torchtitan_rl.types import Episode, Grammar, spans


class SessionEnding(StrEnum):
    """How a session ended. Each session has exactly one ending. Only rewarded sessions are trained
    on."""

    REWARDED = "rewarded"  # closed with a reward
    UNREWARDED = "unrewarded"  # closed without a reward
    ABANDONED = "abandoned"  # neither a request nor a reward came within the timeout
    LIMIT = "limit"  # in a training run: its rollout reached a limit
    FAILED = "failed"  # in a training run: its agent failed, took too long or was cancelled
    RESTARTED = "restarted"  # in a training run: its agent was started again, in a new session
    SHUTDOWN = "shutdown"  # the server shut down first


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """The state of an open session, or the final state of an ended one.

    The tokens of a session that a rollout drives are counted by the run's own ledger; the session's
    report has only the number of ``turns``.
    """

    session_id: str
    ending: SessionEnding | None = None  # None: the session is open
    reward: float | None = None
    temperatures: tuple[float, ...] = ()  # distinct temperatures of its turns, ascending
    turns: int = 0
    unseen_turns: int = 0  # turns whose caller left before the answer
    running_requests: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_masked: Mapping[str, int] = field(default_factory=dict)  # by rule
    tokens_discarded: Mapping[str, int] = field(default_factory=dict)  # by cause
    episodes: tuple[Episode, ...] = ()
    episode_temperatures: tuple[tuple[float, ...], ...] = ()  # for each episode, ascending

    @property
    def tokens_pending(self) -> int:
        masked, discarded = self.tokens_masked.values(), self.tokens_discarded.values()
        return self.tokens_generated - self.tokens_trained - sum(masked) - sum(discarded)

    def _reward_of(self, episode: Episode) -> float | None:
        """The reward of the episode's branch, if it has its own, or else the session's."""
        trained = zip(episode.advantages, episode.loss_mask, strict=True)
        return next((value for value, is_trained in trained if is_trained), self.reward)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types for clients; all numbers are finite."""
        return {
            "session_id": self.session_id,
            "state": "open" if self.ending is None else "closed",
            "ending": None if self.ending is None else self.ending.value,
            "reward": self.reward,
            "temperatures": list(self.temperatures),
            "turns": self.turns,
            "unseen_turns": self.unseen_turns,
            "running_requests": self.running_requests,
            "tokens": {
                "generated": self.tokens_generated,
                "trained": self.tokens_trained,
                "masked": dict(self.tokens_masked),
                "discarded": dict(self.tokens_discarded),
                "pending": self.tokens_pending,
            },
            "episodes": [
                _episode_to_json(episode)
                | {"reward": self._reward_of(episode), "temperatures": list(temperatures)}
                for episode, temperatures in zip(
                    self.episodes, self.episode_temperatures, strict=True
                )
            ],
        }


class SessionCounts:
    """Totals over all sessions, each counted once, by its last report.

    `read` does no work for unchanged sessions: a server may have thousands of sessions, and totals
    are read every second.
    """

    def __init__(self) -> None:
        self._total = Counter({f"sessions_{ending.value}": 0 for ending in SessionEnding})
        self._open: dict[str, SessionReport] = {}
        self._add(SessionReport(session_id=""), 1)  # every name exists from the start

    def update(self, report: SessionReport) -> None:
        """Count ``report`` instead of the session's previous report."""
        before = self._open.pop(report.session_id, None)
        if before is not None:
            self._add(before, -1)
        self._add(report, 1)
        if report.ending is None:
            self._open[report.session_id] = report

    def read(self) -> Mapping[str, float]:
        """Gauges and counters, by name."""
        return {**self._total, "sessions_open": len(self._open)}

    def _add(self, report: SessionReport, sign: int) -> None:
        if report.ending is not None:
            self._total[f"sessions_{report.ending.value}"] += sign
        for name, number in {
            "session_turns": report.turns,
            "session_unseen_turns": report.unseen_turns,
            "session_tokens_generated": report.tokens_generated,
            "session_tokens_trained": report.tokens_trained,
            "session_tokens_masked": sum(report.tokens_masked.values()),
            "session_tokens_discarded": sum(report.tokens_discarded.values()),
            "session_tokens_pending": report.tokens_pending,
        }.items():
            self._total[name] += sign * number


def _episode_to_json(episode: Episode) -> dict[str, Any]:
    """Convert to JSON; ``kept_tokens`` and ``grammars`` are present only if tokens were cut."""
    kept_tokens, length = episode.kept_tokens, len(episode.token_ids)
    fields: dict[str, Any] = {
        "token_ids": list(episode.token_ids),
        "loss_mask": list(episode.loss_mask),
        "logprobs": list(episode.logprobs),
        "versions": list(episode.versions),
    }
    if kept_tokens:
        pairs = zip(kept_of_each(kept_tokens, length), episode.loss_mask, strict=True)
        fields["kept_tokens"] = [kept_to_json(kept) if trained else None for kept, trained in pairs]
    grammars = [
        {
            "start": start,
            "end": end,
            "grammar": base64.b64encode(kept.data).decode(),
            "stop_token_ids": list(kept.stop_token_ids),
        }
        for start, end, kept in spans(kept_tokens, length)
        if isinstance(kept, Grammar)
    ]
    return fields | ({"grammars": grammars} if grammars else {})


# Which requests belong to a response, by the ids that vLLM gives the requests. A response has one
# request for each prompt and each of its ``n`` choices:
#
#   response                          request
#   chatcmpl-ID (chat, messages)      chatcmpl-ID-RANDOM
#   cmpl-ID                           cmpl-ID-PROMPT-RANDOM
#   resp_ID                           resp_ID_NUMBER-RANDOM
#
# RANDOM is 8 hexadecimal digits. If ``n`` is above 1, the request begins with the choice's number
# and "_". ID may be the client's own (``X-Request-Id``), so the forms match both ends of an id.

_FORMS = [
    re.compile(rf"(?:(?P<index>\d+)_)?{form}-[0-9a-f]{{8}}", re.DOTALL)
    for form in (
        r"(?P<response>chatcmpl-.*)",
        r"(?P<response>cmpl-.*)-(?P<prompt>\d+)",
        r"(?P<response>resp_.*)_\d+",
    )
]


def choices_of_response(request_ids: Iterable[str], response_id: str) -> dict[str, int]:
    """Find the requests of a response, each with the index of its choice. The indices of all
    choices of the first prompt come before those of the second one, and so on."""
    names = {request_id: _name(request_id) for request_id in request_ids}
    found = {key: place for key, (response, *place) in names.items() if response == response_id}
    per_prompt = 1 + max((index for _, index in found.values()), default=0)
    return {key: prompt * per_prompt + index for key, (prompt, index) in found.items()}


def without_prefix(request_id: str) -> str:
    """Return what the ids of a response's requests have in common: ``ID`` in the table above."""
    return re.sub(r"^(?:chatcmpl-|cmpl-|resp_)", "", _name(request_id)[0])


def _name(request_id: str) -> tuple[str, int, int]:
    """Parse a request's id into its response, the index of its prompt, and the index of its choice
    for this prompt. An id of another form is its own response."""
    for form in _FORMS:
        if match := form.fullmatch(request_id):
            parts = match.groupdict()
            return parts["response"], int(parts.get("prompt") or 0), int(parts["index"] or 0)
    return request_id, 0, 0


class EpisodesFile:
    """Appends the episodes of rewarded sessions to ``path``, one JSON line each; OSError if it
    cannot be opened. Only one process may write to the file.

    Invariant: either all lines of a session are in the file or none is, even if the disk is full.
    An incomplete last line (kill -9) is removed when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_for_append(path)

    def write(self, report: SessionReport) -> None:
        """Write one line for each episode, with its session's id, its reward and its temperatures.
        Raises OSError: the file cannot be written; it has no line of the session."""
        to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        session = {"session_id": report.session_id}
        lines = [to_json(session | one) + "\n" for one in report.to_json()["episodes"]]
        append_line(self._file, "".join(lines).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
