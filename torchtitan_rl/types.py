"""The frozen dataclasses that flow between the parts of the system. Imports no framework.

Token-aligned sequences are tuples of equal length: entry ``i`` of ``logprobs`` or ``versions``
belongs to entry ``i`` of ``token_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

from torchtitan_rl.images import PromptImage

_T = TypeVar("_T")
_Run = TypeVar("_Run", "VersionRun", "KeptRun")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """A model's logprobs of n given tokens, at temperature 1 and over the whole vocabulary.

    ``top_ids`` and ``top_logprobs`` have its K most likely tokens at each position, the most likely
    one first, as the bytes of little-endian arrays [n, K] of int32 and float32, if requested.
    """

    logprobs: tuple[float, ...]
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    def part(self, start: int, end: int) -> TokenScores:
        """Return the scores of the tokens from ``start`` to ``end``."""
        width = len(self.top_ids) // max(1, len(self.logprobs))  # bytes of one token
        own = slice(start * width, end * width)
        return TokenScores(
            logprobs=self.logprobs[start:end],
            top_ids=self.top_ids[own],
            top_logprobs=self.top_logprobs[own],
        )


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop token or stop string was sampled
    LENGTH = "length"  # the token budget or the context is used up
    ABORT = "abort"  # an abort was requested; the tokens sampled so far are kept


class RolloutStatus(StrEnum):
    """How a rollout ended. Each rollout has exactly one status."""

    COMPLETED = "completed"  # the environment ended the rollout
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # no tokens left for another turn
    STEP_TIMEOUT = "step_timeout"  # one environment call took too long
    ROLLOUT_TIMEOUT = "rollout_timeout"  # a failure, because it depends on the machine
    ENV_ERROR = "env_error"  # the environment raised, or returned a wrong type
    GENERATION_ERROR = "generation_error"  # a request was refused, or its replicas were lost
    REWARD_ERROR = "reward_error"  # a reward function raised, or did not return a finite number
    CANCELLED = "cancelled"

    @property
    def is_failure(self) -> bool:
        """Failed rollouts have no reward, and enter neither baseline nor loss."""
        return self not in _NO_FAILURES


_NO_FAILURES = (RolloutStatus.COMPLETED, RolloutStatus.MAX_TURNS, RolloutStatus.MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion (always n = 1).

    ``seed`` makes the request reproducible, whatever else is in the batch; None draws from the
    replica's own generator. ``stop_token_ids`` are added to the model's end-of-sequence ids. A
    completion ends with the token that completes one of the strings in ``stop``. ``num_logprobs``
    is the number of most likely alternatives to return for each token; without ``with_logprobs`` no
    logprobs are computed, and each is NaN. ``engine_options`` are further sampling parameters, with
    vLLM's names and values of JSON types (penalties, ``logit_bias``, ``structured_outputs``, ...).
    ``prompt_logprobs`` requests `Completion.prompt_scores`, with this number of most likely tokens
    at each position (0: none).
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
    prompt_logprobs: int | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether tokens are excluded from the distribution, other than by a grammar. A greedy
        sampler ignores top_p, top_k and min_p."""
        is_cut = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        has_options = not _CUTTING_OPTIONS.isdisjoint(self.engine_options)
        return (is_cut and self.temperature > 0.0) or self.min_tokens > 0 or has_options

    @property
    def shifts_logits(self) -> bool:
        """Whether penalties or biases change the distribution; such samples are not trained on."""
        return not _SHIFTING_OPTIONS.isdisjoint(self.engine_options)


_CUTTING_OPTIONS = frozenset({"allowed_token_ids", "bad_words"})
_GRAMMARS = {"reasoning_ended", "reasoning_parser_kwargs", "structured_outputs"}
CONSTRAINTS = _CUTTING_OPTIONS | _GRAMMARS
"""Engine options that only exclude tokens, or control where that begins. The tokens sampled with
them can be trained on."""
_SHIFTING_OPTIONS = frozenset(
    {"frequency_penalty", "logit_bias", "presence_penalty", "repetition_penalty"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be completed.

    ``session_id`` keeps a rollout's turns on one replica. ``prompt_id`` keeps the first turns of
    siblings on one replica, so that their common prompt is computed once.

    ``min_version``: only replicas that hold this policy version or a newer one may serve the
    request. ``resume_from`` contains tokens already sampled for this request (``prompt_token_ids``
    and ``max_tokens`` are those of the whole request): the completion begins with these tokens. For
    a replica, the router appends them to the prompt and sets ``num_resumed`` to their number, so
    that stop strings, penalties and grammars still treat them as sampled.

    ``adapter`` names one of the adapters that are served with the policy; empty: the policy itself.

    ``routed_from``: the completion's `routed_experts` leave out this many tokens at the beginning,
    whose experts the caller has.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    session_id: str | None = None
    prompt_id: str | None = None
    min_version: int = 0
    resume_from: Completion | None = None
    num_resumed: int = 0
    adapter: str = ""
    routed_from: int = 0
    images: tuple[PromptImage, ...] = ()  # of the prompt, in the order of their tokens


class VersionRun(NamedTuple):
    """Tokens from index ``start`` on were sampled under policy ``version`` (until the next run)."""

    start: int
    version: int


def add_run(runs: tuple[VersionRun, ...], *, length: int, version: int) -> tuple[VersionRun, ...]:
    """Return ``runs`` after a pull of ``version`` at which ``length`` tokens had been sampled. A
    run without tokens is removed."""
    kept = runs_before(runs, length)
    if kept and kept[-1].version == version:
        return kept
    return (*kept, VersionRun(length, version))


def join_runs(
    first: tuple[_Run, ...], second: tuple[_Run, ...], *, length: int
) -> tuple[_Run, ...]:
    """Join ``first``, the runs of ``length`` tokens, with ``second``, the runs of the tokens after
    them."""
    runs = list(first)
    for run in second:
        if not runs or runs[-1][1] != run[1]:
            runs.append(run._replace(start=length + run.start))
    return tuple(runs)


def runs_before(runs: tuple[VersionRun, ...], length: int) -> tuple[VersionRun, ...]:
    """Return the runs of the first ``length`` tokens."""
    return tuple(run for run in runs if run.start < length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionMetrics:
    """Timings of one request on its replica, in seconds.

    ``requests_in_flight`` is the number of requests in the engine (running or waiting, this request
    included) at the start of the step that finished this request. ``inter_token_latency_s`` is
    ``decode_s`` per token after the first, 0 for a single token.
    """

    queue_s: float  # from entering the inbox to being scheduled first
    time_to_first_token_s: float  # from entering the inbox to the first token
    decode_s: float  # first token to last token
    inter_token_latency_s: float
    cached_tokens: int  # prompt tokens served from the prefix cache
    requests_in_flight: int


TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, logprob) pairs of one position: the sampled token, then the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A compiled grammar: xgrammar's serialization, compressed, which has xgrammar's version.
    `orchestration/batching.py` replays it to find the tokens that it allowed."""

    data: bytes
    stop_token_ids: tuple[int, ...]  # tokens that may end the text


KeptTokens = bytes | Grammar | None
"""The tokens from which one token was sampled.

Bytes are a set packed by `token_sets.py` (empty: the whole vocabulary). A `Grammar` means the
tokens that it allowed, when it starts at the run's first token. None: the set is unknown, so the
token is not trained on.
"""


class KeptRun(NamedTuple):
    """Tokens from index ``start`` on were sampled from ``kept`` (until the next run)."""

    start: int
    kept: KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of T consecutive tokens in the X layers of a policy with experts (MoE).

    ``data`` is an array [T, X, K] of uint8, K experts of a token in each layer, in any order.
    `UNKNOWN_EXPERT` stands for the experts of a token that are not known: the trainer's router
    chooses them.
    """

    data: bytes
    num_layers: int
    per_token: int

    @property
    def num_tokens(self) -> int:
        return len(self.data) // self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.per_token

    def part(self, start: int, end: int | None = None) -> RoutedExperts:
        """Return the experts of the tokens from ``start`` to ``end``."""
        width = self.bytes_per_token
        data = self.data[start * width : None if end is None else end * width]
        return RoutedExperts(data=data, num_layers=self.num_layers, per_token=self.per_token)


UNKNOWN_EXPERT = 255


def spans(runs: Sequence[tuple[int, _T]], length: int) -> Iterator[tuple[int, int, _T]]:
    """Yield (start, end, value) for each run in a sequence of ``length`` tokens.

    >>> list(spans([(0, "a"), (2, "b")], 5))
    [(0, 2, 'a'), (2, 5, 'b')]
    """
    ends = [start for start, _ in runs[1:]] + [length]
    for (start, value), end in zip(runs, ends, strict=bool(runs)):
        yield start, end, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens sampled for one request, with the logprob and the policy version of each token.

    ``logprobs``, as the engine computed them, belong to the processed distribution: after the
    temperature, and renormalized over the kept tokens. A completion that was aborted before its
    first token is empty. If a stop token ended the completion, it is the last token.
    ``stop_reason`` is the stop string or the stop token that ended the completion; None for the
    model's own end-of-sequence tokens. ``top_logprobs`` is empty unless the request asked for
    alternatives. ``kept_tokens`` is empty if no token was excluded. ``version_runs`` is empty in an
    engine's own outputs; `generation/requests.py` fills it in. ``prompt_scores`` are the scores of
    the prompt's tokens after the first one; None unless the request asked for them.

    ``routed_experts`` are the experts of the tokens of prompt and completion, without the last
    token, which no engine computed: ``len(prompt) + len(token_ids) - 1`` tokens, less the first
    `GenerationRequest.routed_from`, which an earlier turn has. None for a policy without experts,
    for a completion without tokens, and if the engine does not record them.
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
    prompt_scores: TokenScores | None = None
    routed_experts: RoutedExperts | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        found = spans(self.version_runs, len(self.token_ids))
        return tuple(version for start, end, version in found for _ in range(start, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The tokens that a running request sampled since its last progress; the first has index
    ``start``.

    ``version_runs`` covers the whole completion so far; ``kept_tokens`` covers only these tokens.
    The last tokens of a completion may never be reported as progress: the `Completion` has them.

    ``routed_experts`` are the experts of the tokens from which these were sampled: of each token
    before one of ``token_ids``, and with ``start`` 0 of the prompt from ``routed_from`` on. All
    progress together has the experts that `Completion.routed_experts` would have at that moment.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_runs: tuple[VersionRun, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    kept_tokens: tuple[KeptRun, ...] = ()
    routed_experts: RoutedExperts | None = None


OnProgress = Callable[[Progress], None]
"""Called on the event loop that awaits the completion, and never after the completion was
returned."""


class GenerateFn(Protocol):
    """Complete one request. Rollouts depend only on this protocol, not on its implementation.

    ``on_progress`` is called with the tokens as they are sampled. Raises GenerationError: the
    request was refused, or no replica that could serve it is left.
    """

    async def __call__(
        self, request: GenerationRequest, on_progress: OnProgress | None = None, /
    ) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One item of a task's dataset. ``problem_id`` is stable across runs; ``data`` can be written
    as JSON.

    ``task`` names the part of a mixture from which it comes; rewards are also reported per part.
    """

    problem_id: str
    data: Mapping[str, Any]
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt, its completion, and the environment's reward for this turn (used with
    ``rollout.credit`` ``turn``).

    If ``is_seen`` is False, the turn is not trained on, because its agent never got the completion.
    ``branch_reward`` replaces the rollout's reward in the episode that contains this turn; if
    several turns of an episode have one, the last counts. ``request_key`` distinguishes the
    requests with the same prompt in a `TurnTree`. ``teacher`` are a teacher's scores of the
    completion's tokens; None if no teacher scored the turn.
    """

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    reward: float | None = None
    text: str | None = None  # the completion as text, where the environment works in text
    is_seen: bool = True
    branch_reward: float | None = None
    request_key: str | None = None  # None: the turn is not in a tree
    teacher: TokenScores | None = None
    images: tuple[PromptImage, ...] = ()  # of the prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.completion.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory. ``reward`` is None if and only if ``status.is_failure``."""

    rollout_id: str
    group_id: str
    problem_id: str
    turns: tuple[Turn, ...]
    status: RolloutStatus
    reward: float | None
    cause: str | None = None  # the error, or the reason for the status
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, if the environment has one
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the environment and the rubric
    # Seconds by what the rollout waited for: environment, generation, reward.
    phase_s: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The sibling rollouts of one problem. Advantages are computed within a group."""

    group_id: str
    problem: Problem
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One token sequence to train on. All token-aligned fields have the length of ``token_ids``.

    ``loss_mask`` is True for each sampled token whose distribution is known; ``kept_tokens`` is
    None for a sampled token whose distribution is unknown. Tokens that were not sampled have the
    placeholders 0.0 (logprob and advantage) and -1 (version). ``kept_tokens`` is empty if no token
    was excluded. ``teacher_top`` has a teacher's most likely tokens at each position, as runs of
    tokens: (index of the first token, `TokenScores`); it is empty without such tokens.
    ``routed_experts`` are the experts of all tokens; None if none are known. ``images`` are the
    images among the tokens, in their order.
    """

    rollout_id: str
    group_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[int, ...]
    kept_tokens: tuple[KeptRun, ...] = ()
    teacher_top: tuple[tuple[int, TokenScores], ...] = ()
    routed_experts: RoutedExperts | None = None
    images: tuple[PromptImage, ...] = ()

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def num_unknown_tokens(self) -> int:
        found = spans(self.kept_tokens, len(self.token_ids))
        return sum(end - start for start, end, kept in found if kept is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A replica's state at one moment. ``kv_use`` is the used share of the cache, 0 to 1, which can
    hold ``kv_tokens`` (0: unknown)."""

    version: int
    running: int
    waiting: int
    kv_use: float
    kv_tokens: int = 0
    preemptions: int
    generated_tokens: int
    tokens_per_second: float  # mean since the previous reading
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """An engine's own counts between two steps: tokens sampled since the engine was built, and
    those of unfinished requests."""

    sampled_tokens: int
    running_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """The effects of one weight pull on one replica. ``stall_s``: seconds without decoding."""

    version: int
    stall_s: float
    running_requests: int
    recomputed: bool
