"""A reward by a language model: an endpoint that speaks the OpenAI API scores each rollout.

Each score, given or not, comes with its cost as metrics. The same question is asked once, also when
siblings ask it at the same time. The policy's text goes only into the judge's prompt, in which it
cannot end the message: a score is read from nothing but the judge's answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torchtitan_rl.data.columns import fill
from torchtitan_rl.environments.checkers import CheckTimeoutError
from torchtitan_rl.environments.judge.cache import ScoreCache
from torchtitan_rl.environments.judge.config import JudgeConfig
from torchtitan_rl.environments.judge.requests import Cost, JudgeClient, JudgeError
from torchtitan_rl.environments.question import as_messages
from torchtitan_rl.environments.scoring import extract
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
