"""The frozen dataclasses that flow between the parts of the system. Imports no framework.

Token-aligned sequences are tuples of equal length: entry ``i`` of ``logprobs`` or ``versions``
belongs to entry ``i`` of ``token_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

_T = TypeVar("_T")
_Run = TypeVar("_Run", "VersionRun", "KeptRun")


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop token or stop string was sampled
    LENGTH = "length"  # the token budget or the context is used up
    ABORT = "abort"  # an abort was requested; the tokens sampled so far are kept


class RolloutStatus(StrEnum):
    """How a rollout ended; each has exactly one."""

    COMPLETED = "completed"  # by the environment
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # no tokens left for another turn
    STEP_TIMEOUT = "step_timeout"  # one environment call took too long
    ROLLOUT_TIMEOUT = "rollout_timeout"  # a failure: how far it got depends on the machine
    ENV_ERROR = "env_error"  # the environment raised, or returned a wrong type
    GENERATION_ERROR = "generation_error"  # a request was refused, or its replicas were lost
    REWARD_ERROR = "reward_error"  # a reward function raised or returned no finite number
    CANCELLED = "cancelled"

    @property
    def is_failure(self) -> bool:
        """Failed rollouts have no reward, and are neither in a baseline nor in the loss."""
        return self in _FAILURES


_FAILURES = frozenset(
    {
        RolloutStatus.STEP_TIMEOUT,
        RolloutStatus.ROLLOUT_TIMEOUT,
        RolloutStatus.ENV_ERROR,
        RolloutStatus.GENERATION_ERROR,
        RolloutStatus.REWARD_ERROR,
        RolloutStatus.CANCELLED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion (always n = 1).

    ``seed`` makes the request reproducible in every batch; None draws from the replica's own
    generator. ``stop_token_ids`` are added to the model's end-of-sequence ids. A
    completion whose text has one of the strings ``stop`` ends with the token that completed it.
    ``num_logprobs`` is the number of most likely alternatives to return for each token; without
    ``with_logprobs`` no logprobs are computed, and each is NaN. ``engine_options`` are further
    sampling parameters with vLLM's names and JSON's types (penalties, ``logit_bias``,
    ``structured_outputs``, ...).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    with_logprobs: bool = True
    num_logprobs: int = 0
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether tokens are cut from the distribution, other than by a grammar;
        `Completion.kept_tokens` has what is left. A greedy sampler ignores top_p, top_k, min_p."""
        is_cut = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        has_options = not _CUTTING_OPTIONS.isdisjoint(self.engine_options)
        return (is_cut and self.temperature > 0.0) or self.min_tokens > 0 or has_options

    @property
    def shifts_logits(self) -> bool:
        """Whether penalties or biases change the distribution; such samples are not trained on."""
        return not _SHIFTING_OPTIONS.isdisjoint(self.engine_options)


_CUTTING_OPTIONS = frozenset({"allowed_token_ids", "bad_words"})
CONSTRAINTS = _CUTTING_OPTIONS | {
    "reasoning_ended",
    "reasoning_parser_kwargs",
    "structured_outputs",
}
"""Engine options that only cut tokens, or say from where on: what they leave can be trained on."""
_SHIFTING_OPTIONS = frozenset(
    {"frequency_penalty", "logit_bias", "presence_penalty", "repetition_penalty"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be completed. ``session_id`` keeps a rollout's turns on one replica, and
    ``prompt_id`` the first turns of siblings, so that their common prompt is computed once.

    ``min_version``: only replicas that hold this policy version or a newer one may serve it.
    ``resume_from`` holds partial tokens of this request (its prompt and budget are unchanged): the
    completion keeps them and continues after them. For a replica, the router appends them to the
    prompt and sets ``num_resumed`` to their number: they are sampled tokens for stop strings,
    penalties and grammars.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    session_id: str | None = None
    prompt_id: str | None = None
    min_version: int = 0
    resume_from: Completion | None = None
    num_resumed: int = 0


class VersionRun(NamedTuple):
    """Tokens from index ``start`` on were sampled under policy ``version`` (until the next run)."""

    start: int
    version: int


def add_run(runs: tuple[VersionRun, ...], *, length: int, version: int) -> tuple[VersionRun, ...]:
    """``runs`` after a pull of ``version`` when ``length`` tokens had been sampled.

    A run in which nothing was sampled disappears; a pull of the version that is already there
    changes nothing.
    """
    kept = runs_before(runs, length)
    if kept and kept[-1].version == version:
        return kept
    return (*kept, VersionRun(length, version))


def join_runs(
    first: tuple[_Run, ...], second: tuple[_Run, ...], *, length: int
) -> tuple[_Run, ...]:
    """The runs of ``length`` tokens, and of those sampled after them, as the runs of the whole."""
    runs = list(first)
    for run in second:
        if not runs or runs[-1][1] != run[1]:
            runs.append(run._replace(start=length + run.start))
    return tuple(runs)


def runs_before(runs: tuple[VersionRun, ...], length: int) -> tuple[VersionRun, ...]:
    """The runs of the first ``length`` tokens."""
    return tuple(run for run in runs if run.start < length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionMetrics:
    """Timings of one request on its replica, in seconds.

    ``requests_in_flight`` is the number of requests, this one included, that the engine held
    (running or waiting, after admission) when the step that finished this one began.
    ``inter_token_latency_s`` is ``decode_s`` per token after the first, 0 for a single token.
    """

    queue_s: float  # inbox to first scheduled
    time_to_first_token_s: float  # inbox to first token
    decode_s: float  # first token to last token
    inter_token_latency_s: float
    cached_tokens: int  # prompt tokens served from the prefix cache
    requests_in_flight: int


TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, logprob) pairs of one position: the sampled token, then the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A compiled grammar; `orchestration/batching.py` replays which tokens it allowed.

    ``data`` is xgrammar's serialization (compressed), which names the version that can read it.
    """

    data: bytes
    stop_token_ids: tuple[int, ...]  # that may end it


KeptTokens = bytes | Grammar | None
"""The tokens that one token was sampled from: a set that `token_sets.py` packs (empty:
the whole vocabulary), or those that a grammar allowed, from the run's first token on. None: not
known, so that the token is not trained on."""


class KeptRun(NamedTuple):
    """Tokens from index ``start`` on were sampled from ``kept`` (until the next run)."""

    start: int
    kept: KeptTokens


def spans(runs: Sequence[tuple[int, _T]], length: int) -> Iterator[tuple[int, int, _T]]:
    """(start, end, value) of each run of a sequence of ``length`` tokens.

    >>> list(spans([(0, "a"), (2, "b")], 5))
    [(0, 2, 'a'), (2, 5, 'b')]
    """
    ends = [start for start, _ in runs[1:]] + [length]
    for (start, value), end in zip(runs, ends, strict=bool(runs)):
        yield start, end, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens sampled for one request, with the logprob and version each was sampled under.

    ``logprobs`` are of the processed distribution: temperature applied, renormalized over the
    tokens that were kept. A completion that was aborted before its first token is empty. A stop
    token that ended it is its last token; ``stop_reason`` is the stop string, or the stop token
    other than the model's own, that ended it. ``top_logprobs`` is empty unless the request asked
    for alternatives, ``kept_tokens`` where nothing was cut.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_runs: tuple[VersionRun, ...]
    finish_reason: FinishReason
    metrics: CompletionMetrics | None = None
    replica: str = ""
    stop_reason: int | str | None = None
    top_logprobs: tuple[TopLogprobs, ...] = ()
    kept_tokens: tuple[KeptRun, ...] = ()

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy version of each token."""
        versions: list[int] = []
        for start, end, version in spans(self.version_runs, len(self.token_ids)):
            versions.extend([version] * (end - start))
        return tuple(versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a running request has sampled since its last progress: its tokens from ``start`` on.

    ``version_runs`` are those of the whole completion so far; ``kept_tokens`` are of these tokens.
    The last tokens of a completion may come only with the completion.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_runs: tuple[VersionRun, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    kept_tokens: tuple[KeptRun, ...] = ()


OnProgress = Callable[[Progress], None]
"""Called on the event loop that awaits the completion, never after it has been returned."""


class GenerateFn(Protocol):
    """Completes one request. A rollout does not depend on what implements it.

    ``on_progress`` gets the tokens as they are sampled.

    Raises:
        GenerationError: the request was refused, or every replica that could serve it is gone.
    """

    async def __call__(
        self, request: GenerationRequest, on_progress: OnProgress | None = None, /
    ) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One item of a task's dataset. ``problem_id`` is stable across runs; ``data`` is JSON-able.

    ``task`` is the part of a mixture that it comes from; rewards are also reported by it.
    """

    problem_id: str
    data: Mapping[str, Any]
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt, its completion, and the environment's reward for it, which is trained on with
    ``rollout.credit`` ``turn``.

    A turn that was not seen (its agent ended before it got the completion) is not trained on.
    ``branch_reward`` replaces the rollout's reward in the episode that contains this turn; the last
    one of an episode counts. ``request_key`` tells apart the requests with this prompt that a
    `TurnTree` got.
    """

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    reward: float | None = None
    text: str | None = None  # the completion as text, where the environment works in text
    is_seen: bool = True
    branch_reward: float | None = None
    request_key: str | None = None  # None: not of a tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory. ``reward`` is None if and only if ``status.is_failure``."""

    rollout_id: str
    group_id: str
    problem_id: str
    turns: tuple[Turn, ...]
    status: RolloutStatus
    reward: float | None
    cause: str | None = None  # what went wrong
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, if the environment has one
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the environment and the rubric

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The sibling rollouts of one problem: the unit of advantage."""

    group_id: str
    problem: Problem
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What is trained on: one token sequence; all token-aligned fields have its length.

    ``loss_mask`` is True on the sampled tokens whose distribution is known: the others have None in
    ``kept_tokens``. Tokens that were not sampled have 0.0 as logprob and advantage and -1 as
    version, which mean nothing. ``kept_tokens`` is empty where nothing was cut.
    """

    rollout_id: str
    group_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[int, ...]
    kept_tokens: tuple[KeptRun, ...] = ()

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def num_unknown_tokens(self) -> int:
        """Sampled tokens without loss, since it is not known what they were sampled from."""
        found = spans(self.kept_tokens, len(self.token_ids))
        return sum(end - start for start, end, kept in found if kept is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A replica's state at one moment. ``kv_use`` is the used share of the cache, 0 to 1."""

    version: int
    running: int
    waiting: int
    kv_use: float
    preemptions: int
    generated_tokens: int
    tokens_per_second: float  # since the previous reading
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """An engine's own counts of tokens, read between two steps.

    ``sampled_tokens``: of all requests since the engine was built; ``running_tokens``: of those
    that are unfinished.
    """

    sampled_tokens: int
    running_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """What one weight pull did to one replica. ``stall_s``: seconds without decoding."""

    version: int
    stall_s: float
    running_requests: int
    recomputed: bool
