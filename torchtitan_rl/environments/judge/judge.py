"""A reward by a language model: an endpoint that speaks the OpenAI API scores each rollout.

Each score, given or not, comes with its cost as metrics. The same question is asked once, also when
siblings ask it at the same time. The policy's text goes only into the judge's prompt, in which it
cannot end the message: a score is read from nothing but the judge's answer.

Scores that were given before, in memory or in a file that outlives the run.

Invariant: at most ``size`` scores; the oldest are dropped first. Processes may share a file.

Requests to the judge's endpoint: limited, repeated where that may help, and counted.

Invariants: within any 60 seconds at most ``requests_per_minute`` requests begin. The client repeats
nothing by itself, so what is counted is what was sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import random
import re
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torchtitan_rl.data.columns import fill
from torchtitan_rl.environments.checkers import CheckTimeoutError
from torchtitan_rl.environments.judge.config import JudgeConfig
from torchtitan_rl.environments.question import as_messages
from torchtitan_rl.environments.scoring import extract
from torchtitan_rl.errors import ConfigError, TorchtitanRLError, one_line
from torchtitan_rl.rollout.chatml import Message
from torchtitan_rl.rollout.rubric import RewardFunction, Score
from torchtitan_rl.types import Problem, Rollout

logger = logging.getLogger(__name__)

_GRACE_S = 30.0  # the judge's own deadline comes before that of the rubric
# First character of what chat formats mark turns with: <|im_end|>, <turn|>, </s>, <end_of_turn>.
_CONTROL_STRING = re.compile(r"<(?=[^<>\s]{1,40}[|\uff5c]>|/s>|\w{1,40}_of_turn>)")


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
        self._config = config
        self._client = JudgeClient(config)
        self._scores = ScoreCache(config.cache_size, config.cache_file)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def timeout_s(self) -> float:
        """For the rubric that the judge is a part of."""
        return self._config.deadline_s + _GRACE_S

    def reward_function(self, *, name: str = "judge", weight: float = 1.0) -> RewardFunction:
        return RewardFunction(name=name, function=self.score, weight=weight)

    async def score(self, rollout: Rollout, problem: Problem) -> Score:
        """
        Raises:
            DataError: the problem has no such column as the prompt names.
        """
        cost = Cost()
        row = {**problem.data, **texts_of(rollout)}
        place = f"{rollout.rollout_id}, the judge's prompt"
        system, prompt = (
            _as_text(fill(template, row, place))
            for template in (self._config.system, self._config.prompt)
        )
        messages = as_messages(system, prompt)
        where = f"JudgeConfig.base_url {self._config.base_url}"
        try:
            async with asyncio.timeout(self._config.deadline_s):
                value = await self._score_of(messages, cost)
        except TimeoutError:
            cause = f"{where}: no score after {self._config.deadline_s} s; the last: {cost.last}"
        except JudgeError as error:
            cause = f"{where}: {error}"
        except sqlite3.Error as error:
            cause = f"the judge's cache_file {self._config.cache_file}: {error}"
        else:
            return Score(reward=value, components=self._components(cost, failures=0))
        components = self._components(cost, failures=1)
        if self._config.on_failure == "error":
            return Score(reward=None, components=components, cause=cause)
        logger.warning("%s gets the judge's default score: %s", rollout.rollout_id, cause)
        return Score(reward=self._config.default_score, components=components)

    async def close(self) -> None:
        await self._client.close()
        self._scores.close()

    async def _score_of(self, messages: Sequence[Message], cost: Cost) -> float:
        config = self._config
        asked = [config.base_url, config.model, config.options, messages, config.score_pattern]
        key = hashlib.sha256(
            json.dumps([*asked, config.lowest, config.highest], sort_keys=True).encode()
        ).hexdigest()
        async with self._asking.setdefault(key, asyncio.Lock()):
            score = self._scores.get(key)
            if score is None:
                score = await self._client.ask(messages, self._read, cost)
                self._scores.put(key, score)
        return score

    async def _read(self, answer: str) -> float | None:
        """The score in an answer, from 0 to 1; None where there is none."""
        try:
            score = float(await extract(self._config.score_pattern, answer) or "")
        except (ValueError, CheckTimeoutError):
            return None
        lowest, highest = self._config.lowest, self._config.highest
        return (score - lowest) / (highest - lowest) if lowest <= score <= highest else None

    def _components(self, cost: Cost, *, failures: int) -> Mapping[str, float]:
        config = self._config
        components = {
            "requests": float(cost.requests),
            "prompt_tokens": float(cost.prompt_tokens),
            "completion_tokens": float(cost.completion_tokens),
            "cached": float(not cost.requests and not failures),
            "failures": float(failures),
        }
        price = math.fsum(
            (
                config.price_per_million_prompt_tokens * cost.prompt_tokens / 1e6,
                config.price_per_million_completion_tokens * cost.completion_tokens / 1e6,
            )
        )
        return components | {"cost": price} if price else components


def _as_text(prompt: str) -> str:
    """With a space in what the judge's endpoint might take for control tokens: our own does not,
    but others do, and their vocabulary is not known."""
    return _CONTROL_STRING.sub(r"\g<0> ", prompt)


def texts_of(rollout: Rollout) -> dict[str, Any]:
    """What a rollout gives a prompt: ``prompt``, ``completion`` and ``conversation``."""
    messages = rollout.messages
    if not messages:  # of an environment without messages
        texts = [turn.text or "" for turn in rollout.turns]
        return {
            "prompt": "",
            "completion": texts[-1] if texts else "",
            "conversation": "\n\n".join(texts),
        }
    spoken = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
    before = messages[: spoken[0]] if spoken else messages
    return {
        "prompt": "\n\n".join(_content(one) for one in before),
        "completion": _content(messages[spoken[-1]]) if spoken else "",
        "conversation": "\n\n".join(f"{one['role']}: {_content(one)}" for one in messages),
    }


def _content(message: Message) -> str:
    """The text of a message, with the tools that it calls."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, (text, *calls)))


_BUSY_TIMEOUT_S = 1.0  # another process writes; the event loop waits


class ScoreCache:
    """
    Raises:
        ConfigError: ``file`` cannot be opened, or is something else.
    """

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
        """
        Raises:
            sqlite3.Error: the file cannot be read.
        """
        row = self._db.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: str, score: float) -> None:
        """
        Raises:
            sqlite3.Error: the file cannot be written.
        """
        if self._size == 0:
            return
        self._db.execute("INSERT OR REPLACE INTO scores (key, score) VALUES (?, ?)", (key, score))
        self._db.execute(
            "DELETE FROM scores WHERE number <= (SELECT max(number) FROM scores) - ?",
            (self._size,),
        )

    def close(self) -> None:
        self._db.close()


_MAX_BACKOFF_S = 60.0
_REPEATED = (408, 409, 429)  # and all from 500


class JudgeError(TorchtitanRLError):
    """There is no score, and why."""


@dataclass(slots=True)
class Cost:
    """Of one score; ``last`` is what came of the newest attempt."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last: str = "it waited for its turn"

    def add(self, usage: Any) -> None:
        self.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        self.completion_tokens += getattr(usage, "completion_tokens", None) or 0


class RateLimit:
    """Lets callers pass in their order; ``per_minute`` 0 lets all pass at once."""

    def __init__(self, per_minute: int) -> None:
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        if self._begun.maxlen == 0:
            return
        async with self._turn:
            loop = asyncio.get_running_loop()
            if len(self._begun) == self._begun.maxlen:
                await asyncio.sleep(self._begun[0] + 60.0 - loop.time())
            self._begun.append(loop.time())


class JudgeClient:
    """Asks one endpoint; all scores of a run share it, and its limits."""

    def __init__(self, config: JudgeConfig) -> None:
        from openai import AsyncOpenAI  # takes a second to import

        self._config = config
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=os.environ.get(config.api_key_env) or "none",
            timeout=config.request_timeout_s,
            max_retries=0,
        )
        self._free = asyncio.Semaphore(config.max_concurrent)
        self._limit = RateLimit(config.requests_per_minute)

    async def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[str], Awaitable[float | None]],
        cost: Cost,
    ) -> float:
        """The first answer of which ``read`` makes a score.

        Raises:
            JudgeError: no attempt succeeded, or the endpoint refuses the request.
        """
        for attempt in range(self._config.attempts):
            async with self._free:
                await self._limit.wait()
                answer, retry_after_s = await self._attempt(messages, cost)
            if answer is not None:
                if (score := await read(answer)) is not None:
                    return score
                cost.last = f"its answer has no score: {answer[-200:]!r}"
            if attempt + 1 < self._config.attempts:
                await asyncio.sleep(max(retry_after_s, self._backoff_s(attempt)))
        raise JudgeError(f"{cost.requests} requests gave no score; the last: {cost.last}")

    async def close(self) -> None:
        await self._client.close()

    async def _attempt(self, messages: Sequence[Message], cost: Cost) -> tuple[str | None, float]:
        """The answer, or None and the seconds that the endpoint wants to be left alone."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        cost.requests += 1
        cost.last = "it waited for the endpoint"
        untyped: Any = messages
        try:
            response = await self._client.chat.completions.create(
                model=self._config.model, messages=untyped, extra_body=self._config.options
            )
        except APIConnectionError as error:
            cost.last = f"{type(error).__name__}: {error.__cause__ or error}"
            return None, 0.0
        except APIStatusError as error:
            cost.last = f"HTTP {error.status_code}: {error.message}"
            if error.status_code < 500 and error.status_code not in _REPEATED:
                raise JudgeError(cost.last) from error
            return None, _retry_after_s(error.response.headers.get("retry-after", ""))
        except (OpenAIError, ValueError) as error:  # an answer that is not of the API
            cost.last = one_line(error)
            return None, 0.0
        # The client does not check what the endpoint answers: every part may be missing.
        cost.add(getattr(response, "usage", None))
        choice = next(iter(getattr(response, "choices", None) or ()), None)
        return str(getattr(getattr(choice, "message", None), "content", None) or ""), 0.0

    def _backoff_s(self, attempt: int) -> float:
        longest = min(self._config.backoff_s * 2.0**attempt, _MAX_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)


def _retry_after_s(header: str) -> float:
    """Of seconds; a date is not kept."""
    try:
        return max(0.0, float(header))
    except ValueError:
        return 0.0
