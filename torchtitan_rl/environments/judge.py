"""A reward by a language model: an endpoint that speaks the OpenAI API scores each rollout.

Metrics report each score, its cost, and failed attempts. The same question is asked once, even if
several rollouts ask it at the same time. The policy's text goes only into the judge's prompt, where
it cannot end the message; a score is read only from the judge's answer.

Invariants: within any 60 seconds at most ``requests_per_minute`` requests begin. Every request that
is sent is counted, including those that the client repeats by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakValueDictionary

from torchtitan_rl.bounds import Count, NotNegative, Positive, PositiveFloat, Share, without_login
from torchtitan_rl.data.columns import fill, pattern_errors, template_errors, url_errors
from torchtitan_rl.environments.question import as_messages
from torchtitan_rl.environments.scoring import CheckTimeoutError, extract
from torchtitan_rl.errors import ConfigError, one_line
from torchtitan_rl.rollout.chatml import Message
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score, environment_score
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.types import Problem, Rollout

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig

logger = logging.getLogger(__name__)

_GRACE_S = 30.0  # the rubric's time-out is this much later than the judge's own deadline
_MAX_BACKOFF_S = 60.0
_MAX_ANSWER = 1 << 16  # characters, the last of the judge's answer
_BUSY_TIMEOUT_S = 1.0  # time to wait while another process writes scores; blocks the event loop
# The "<" of the markers of chat formats: <|im_end|>, <turn|>, </s>, <end_of_turn>.
_CONTROL_STRING = re.compile(r"<(?=[^<>\s]{1,40}[|\uff5c]>|/s>|\w{1,40}_of_turn>)")

_PROMPT = """\
Judge how good the last answer in this conversation is.

{conversation}

Explain briefly, then write "Score: N", where N is between 0 (useless) and 10 (perfect)."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model that scores rollouts, at an endpoint that speaks the OpenAI API."""

    base_url: Annotated[str, without_login("name its key in api_key_env")] = (
        "http://127.0.0.1:8000/v1"
    )
    """Address of the endpoint, with ``/v1``."""
    model: str = "policy"
    """Name of the model, as the endpoint knows it."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key; local endpoints need none."""
    prompt: str = _PROMPT
    """The user's message to the judge. ``{completion}`` is the policy's last message,
    ``{prompt}`` what came before its first one, ``{conversation}`` all of it; other names are
    those of ``problem.data``, such as ``{answer}``."""
    system: str = ""
    """The system message for the judge, a template like ``prompt``. Empty: there is none."""
    score_pattern: str = r"""(?i)score[\s:=*_`"'|]*(-?(?:\d+(?:\.\d+)?|\.\d+))"""
    """Regular expression whose last match in the judge's answer is the score; its first group, if
    it has one."""
    lowest: float = 0.0
    """The score that becomes 0."""
    highest: float = 10.0
    """The score that becomes 1. An answer with a score outside the range counts as an answer
    without a score."""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    """More fields of the request, with the names that the endpoint uses."""
    max_concurrent: Positive = 16
    """Requests that may run at the same time."""
    requests_per_minute: Count = 0
    """Requests that may begin within any 60 seconds, repeated ones included, spread evenly; 0: any
    number."""
    attempts: Positive = 4
    """Requests for one score at most: the judge is asked again when the connection failed, the
    endpoint was busy or at fault (408, 409, 429, 5xx), or the answer had no score. After a fault
    the wait is what ``Retry-After`` says (more than two minutes is a failure), else 0.5 s, doubled
    for each attempt up to 8 s."""
    backoff_s: NotNegative = 0.5
    """Seconds before the judge is asked again after an answer without a score, doubled for each
    attempt and shortened at random by up to a half."""
    request_timeout_s: PositiveFloat = 60.0
    """Seconds for one request."""
    deadline_s: PositiveFloat = 300.0
    """Seconds for one score, including all attempts and the time in the queue."""
    on_failure: Literal["error", "default"] = "error"
    """When there is no score: ``error`` fails the rollout, which is then not trained on;
    ``default`` gives ``default_score``. Either is counted, by ``reward/judge/failures``."""
    default_score: Share = 0.0
    """From 0 to 1, after ``lowest`` and ``highest`` are applied."""
    cache_size: Count = 100_000
    """Number of scores that are kept, so that the same question is asked only once. When more are
    needed, the oldest are dropped. 0: no score is kept."""
    cache_file: Path | None = None
    """File in which the scores are kept for later runs. Without a file they are kept in memory."""
    price_per_million_prompt_tokens: NotNegative = 0.0
    """For the metric ``reward/judge/cost``, in any currency."""
    price_per_million_completion_tokens: NotNegative = 0.0
    """For the metric ``reward/judge/cost``, in any currency."""

    def errors(self, section: str = "task.judge") -> list[str]:
        found = url_errors(self, section, "base_url")
        if not self.model:
            found.append(f"{section}.model is empty: give a name that /v1/models lists")
        found += template_errors(self, section, "prompt", "system")
        found += pattern_errors(self, section, "score_pattern")
        if not self.lowest < self.highest:
            found.append(f"{section}.lowest={self.lowest}: must be below highest ({self.highest})")
        return found


@dataclass(slots=True)
class _Cost:
    """The requests for one score; ``last`` is the outcome of the newest one."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last: str = "it waited for its turn"


_cost: ContextVar[_Cost] = ContextVar("cost")  # cost of the score that the current task asks for


class Judge:
    """A reward function of a rubric::

        def rubric(self) -> Rubric:
            judge = Judge(self.judge)
            return Rubric([judge.reward_function()], timeout_s=judge.timeout_s)

    Its metrics are ``reward/judge``, the score, and for each rollout ``reward/judge/requests``,
    ``prompt_tokens``, ``completion_tokens``, ``cost`` (where there is a price), ``cached`` and
    ``failures``.
    """

    def __init__(self, config: JudgeConfig) -> None:
        from aiolimiter import AsyncLimiter
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # the import takes a second

        self._config = config
        self._scores = ScoreCache(config.cache_size, config.cache_file)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free = asyncio.Semaphore(config.max_concurrent)
        per_minute = config.requests_per_minute
        self._limit = AsyncLimiter(1, 60.0 / per_minute) if per_minute else None
        hooks = {"request": [self._before_request], "response": [_after_response]}
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=os.environ.get(config.api_key_env) or "none",
            timeout=config.request_timeout_s,
            http_client=DefaultAsyncHttpxClient(event_hooks=hooks),
        )

    @property
    def timeout_s(self) -> float:
        """The time-out for a rubric with this judge."""
        return self._config.deadline_s + _GRACE_S

    def reward_function(self, *, name: str = "judge", weight: float = 1.0) -> RewardFunction:
        return RewardFunction(name=name, function=self.score, weight=weight)

    async def score(self, rollout: Rollout, problem: Problem) -> Score:
        """Score a rollout. DataError: the prompt names a column that the problem does not have."""
        asked = await self.ask({**problem.data, **texts_of(rollout)}, rollout.rollout_id)
        if asked.reward is not None or self._config.on_failure == "error":
            return asked
        logger.warning("%s gets the judge's default score: %s", rollout.rollout_id, asked.cause)
        return Score(reward=self._config.default_score, components=asked.components)

    async def ask(self, row: Mapping[str, Any], name: str) -> Score:
        """Ask for the score of what the prompt says of ``row``; ``name`` is for errors. Without a
        score, the result has a cause. Raises as `score` does."""
        config, cost = self._config, _Cost()
        _cost.set(cost)
        place = f"{name}, the judge's prompt"
        # Not a control token: our endpoint does not parse texts for them, but others may.
        system, prompt = (
            _CONTROL_STRING.sub(r"\g<0> ", fill(template, row, place))
            for template in (config.system, config.prompt)
        )
        where = f"JudgeConfig.base_url {config.base_url}"
        value = None
        try:
            async with asyncio.timeout(config.deadline_s):
                value = await self._score_of(as_messages(system, prompt), cost)
        except TimeoutError:
            cause = f"{where}: no score after {config.deadline_s} s; the last: {cost.last}"
        except sqlite3.Error as error:
            cause = f"the judge's cache_file {config.cache_file}: {error}"
        else:
            cause = f"{where}: {cost.requests} requests gave no score; the last: {cost.last}"
        components = self._components(cost, failures=int(value is None))
        return Score(reward=value, components=components, cause=cause if value is None else None)

    async def close(self) -> None:
        await self._client.close()
        self._scores.close()

    async def _score_of(self, messages: Sequence[Message], cost: _Cost) -> float | None:
        config = self._config
        asked = [config.base_url, config.model, config.options, messages, config.score_pattern]
        key = hashlib.sha256(
            json.dumps([*asked, config.lowest, config.highest], sort_keys=True).encode()
        ).hexdigest()
        async with self._asking.setdefault(key, asyncio.Lock()):
            score = self._scores.get(key)
            if score is None and (score := await self._ask(messages, cost)) is not None:
                self._scores.put(key, score)
        return score

    async def _ask(self, messages: Sequence[Message], cost: _Cost) -> float | None:
        from openai import APIConnectionError, APIStatusError, OpenAIError

        while (left := self._config.attempts - (num_before := cost.requests)) > 0:
            if cost.requests:
                longest = min(self._config.backoff_s * 2.0 ** (cost.requests - 1), _MAX_BACKOFF_S)
                await asyncio.sleep(longest * random.uniform(0.5, 1.0))
            try:
                async with self._free:
                    answer = await self._answer(messages, cost, max_retries=left - 1)
            except APIConnectionError as error:
                cost.last = f"{type(error).__name__}: {error.__cause__ or error}"
                return None
            except APIStatusError as error:
                cost.last = f"HTTP {error.status_code}: {error.message}"
                return None
            except (OpenAIError, ValueError) as error:  # the answer does not follow this API
                cost.last = one_line(error)
                if cost.requests == num_before:
                    return None  # it cannot be sent: a text that is not valid Unicode
                continue
            if (score := await self._read(answer)) is not None:
                return score
            cost.last = f"its answer has no score: {answer[-200:]!r}"
        return None

    async def _answer(self, messages: Any, cost: _Cost, *, max_retries: int) -> str:
        """The judge's text. The client does not validate the answer, of which parts may be
        missing."""
        response: Any = await self._client.with_options(
            max_retries=max_retries
        ).chat.completions.create(
            model=self._config.model, messages=messages, extra_body=self._config.options
        )
        usage = getattr(response, "usage", None)
        cost.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        cost.completion_tokens += getattr(usage, "completion_tokens", None) or 0
        choice = next(iter(getattr(response, "choices", None) or ()), None)
        if getattr(choice, "finish_reason", None) == "length":
            # What it quotes of the policy's text could be taken for the score.
            raise ValueError("its answer was cut off: raise max_tokens in the judge's options")
        content = str(getattr(getattr(choice, "message", None), "content", None) or "")
        return content[-_MAX_ANSWER:]

    async def _read(self, answer: str) -> float | None:
        """The score in an answer, scaled to 0 to 1; None if the answer has no valid score."""
        try:
            score = float(await extract(self._config.score_pattern, answer) or "")
        except (ValueError, CheckTimeoutError):
            return None
        lowest, highest = self._config.lowest, self._config.highest
        return (score - lowest) / (highest - lowest) if lowest <= score <= highest else None

    async def _before_request(self, request: object) -> None:
        """Called by the client before each request, including repeated requests."""
        if self._limit is not None:
            await self._limit.acquire()
        cost = _cost.get()
        cost.requests += 1
        cost.last = "it waited for the endpoint"

    def _components(self, cost: _Cost, *, failures: int) -> Mapping[str, float]:
        config = self._config
        counts = {
            "requests": cost.requests,
            "prompt_tokens": cost.prompt_tokens,
            "completion_tokens": cost.completion_tokens,
            "cached": not cost.requests and not failures,
            "failures": failures,
        }
        components = {name: float(count) for name, count in counts.items()}
        for_prompt = config.price_per_million_prompt_tokens * cost.prompt_tokens / 1e6
        for_completion = config.price_per_million_completion_tokens * cost.completion_tokens / 1e6
        price = for_prompt + for_completion
        return components | {"cost": price} if price else components


async def _after_response(response: Any) -> None:
    _cost.get().last = f"HTTP {response.status_code}"


def texts_of(rollout: Rollout) -> dict[str, Any]:
    """The texts for the judge's prompt: ``prompt``, ``completion`` and ``conversation``."""
    messages = rollout.messages
    if not messages:  # the environment has no messages
        texts = ["", *(turn.text or "" for turn in rollout.turns)]
        return {"prompt": "", "completion": texts[-1], "conversation": "\n\n".join(texts[1:])}
    spoken = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
    before = messages[: spoken[0]] if spoken else messages
    return {
        "prompt": "\n\n".join(_content(one) for one in before),
        "completion": _content(messages[spoken[-1]]) if spoken else "",
        "conversation": "\n\n".join(f"{one['role']}: {_content(one)}" for one in messages),
    }


def _content(message: Message) -> str:
    """The text of a message, with its tool calls."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, (text, *calls)))


class ScoreCache:
    """The newest ``size`` scores, in memory or in a file, which several processes may share. `get`
    and `put` raise `sqlite3.Error` if the file cannot be read or written. Raises ConfigError:
    ``file`` cannot be opened, or is not a database."""

    def __init__(self, size: int, file: Path | None = None) -> None:
        self._size = size
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                file or ":memory:",
                timeout=_BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS scores "
                "(number INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, score REAL NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the judge's cache_file {file}: {error}; give another file, or delete this one"
            ) from error

    def get(self, key: str) -> float | None:
        row = self._db.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: str, score: float) -> None:
        if self._size == 0:
            return
        self._db.execute("INSERT OR REPLACE INTO scores (key, score) VALUES (?, ?)", (key, score))
        self._db.execute(
            "DELETE FROM scores WHERE number <= (SELECT max(number) FROM scores) - ?", (self._size,)
        )

    def close(self) -> None:
        self._db.close()


@dataclass(frozen=True, kw_only=True)
class JudgedTask(Task):
    """The reward is ``judge_weight`` times the judge's score, and ``task_weight`` times the task's
    own reward::

        JudgedTask(
            task=DataTask(train=("data/questions.jsonl",), answer="", keep=("question",)),
            judge=JudgeConfig(base_url="http://127.0.0.1:8000/v1", model="judge"),
        )

    Options of the task: ``--task.task.prompt "{text}"``; of the judge:
    ``--task.judge.requests-per-minute 600``.
    """

    task: Task
    """The task that is judged; not one of agents."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Whom to ask, and what."""
    judge_weight: float = 1.0
    """Weight of the judge's score, which is from 0 to 1."""
    task_weight: float = 0.0
    """Weight of the task's own reward; 0 makes that a metric, ``reward/task``."""
    solved_at: float = 0.8
    """Reward from which a problem counts as solved (pass@k)."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return self.task.dataset(split, seed=seed)

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        return self.task.environment(problem, tokenizer=tokenizer, limits=limits)

    def rubric(self) -> Rubric:
        judge, (own, own_timeout_s) = Judge(self.judge), self.own_reward()
        return Rubric(
            [judge.reward_function(weight=self.judge_weight), own],
            timeout_s=max(judge.timeout_s, own_timeout_s),
        )

    def own_reward(self) -> tuple[RewardFunction, float]:
        """Return the reward function of the task that is judged, and its time-out in seconds."""
        own = self.task.rubric()

        async def own_score(rollout: Rollout, problem: Problem) -> Score:
            return environment_score(rollout) if own is None else await own.score(rollout, problem)

        timeout_s = 0.0 if own is None else own.timeout_s
        return RewardFunction(name="task", function=own_score, weight=self.task_weight), timeout_s

    def success_reward(self) -> float:
        return self.solved_at

    def errors(self) -> list[str]:
        found = [error.replace("task", "task.task", 1) for error in self.task.errors()]
        found += self.judge.errors()
        if hasattr(self.task, "agent"):
            found.append("task.task: agents cannot be judged so; give them a rubric with a Judge")
        rubric = None if found else self.task.rubric()
        if rubric is not None and rubric.scores_groups:
            found.append("task.task: its rubric scores whole groups, which cannot be combined")
        return found
