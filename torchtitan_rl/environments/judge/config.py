"""What an LLM judge asks, whom, and what happens when it gives no score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.data.columns import template_error
from torchtitan_rl.environments.scoring import pattern_errors

_PROMPT = """\
Judge how good the last answer in this conversation is.

{conversation}

Explain briefly, then write "Score: N", where N is between 0 (useless) and 10 (perfect)."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model that scores rollouts, at an endpoint that speaks the OpenAI API."""

    base_url: str = "http://127.0.0.1:8000/v1"
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
    """A system message for the judge, a template like ``prompt``; none where it is empty."""
    score_pattern: str = r"""(?i)score[\s:=*_`"'|]*(-?(?:\d+(?:\.\d+)?|\.\d+))"""
    """Regular expression whose last match in the judge's answer is the score; its first group, if
    it has one."""
    lowest: float = 0.0
    """The score that becomes 0."""
    highest: float = 10.0
    """The score that becomes 1; one outside of this range is none."""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    """More fields of the request, as the endpoint knows them."""
    max_concurrent: int = 16
    """Requests that may run at once."""
    requests_per_minute: int = 0
    """Requests that may begin within any 60 seconds, repeated ones included; 0: any number."""
    attempts: int = 4
    """How often it is asked for one score: again when the connection failed, the endpoint was
    busy or at fault (408, 409, 429, 5xx), or the answer had no score."""
    backoff_s: float = 0.5
    """Seconds before the second attempt, doubled for each later one and shortened at random by up
    to a half; a longer ``Retry-After`` of the endpoint is kept."""
    request_timeout_s: float = 60.0
    """Seconds for one request."""
    deadline_s: float = 300.0
    """Seconds for one score, waiting for a turn and all attempts included."""
    on_failure: Literal["error", "default"] = "error"
    """When there is no score: ``error`` fails the rollout, which is then not trained on;
    ``default`` gives ``default_score``. Either is counted, by ``reward/judge/failures``."""
    default_score: float = 0.0
    """From 0 to 1, after ``lowest`` and ``highest`` are applied."""
    cache_size: int = 100_000
    """Scores that are kept, so that the same question is asked once; the oldest are dropped. 0
    keeps none."""
    cache_file: Path | None = None
    """File that keeps them after the run, for others to use; without it they are in memory."""
    price_per_million_prompt_tokens: float = 0.0
    """For the metric ``reward/judge/cost``, in any currency."""
    price_per_million_completion_tokens: float = 0.0
    """For the metric ``reward/judge/cost``, in any currency."""

    def errors(self, name: str = "task.judge") -> list[str]:
        """What is wrong with the fields, of which ``name`` is the section."""
        return [f"{name}.{error}" for error in self._errors()]

    def _errors(self) -> Iterator[str]:
        if not self.base_url.startswith(("http://", "https://")):
            yield f"base_url={self.base_url!r}: must begin with http:// or https://"
        if not self.model:
            yield "model is empty: give the name that the endpoint lists under /v1/models"
        for field_name in ("prompt", "system"):
            if wrong := template_error(getattr(self, field_name)):
                yield f"{field_name}={getattr(self, field_name)!r}: {wrong}"
        for error in pattern_errors("score_pattern", self.score_pattern):
            yield error.removeprefix("task.")
        if not self.lowest < self.highest:
            yield f"lowest={self.lowest}: must be below highest ({self.highest})"
        if not 0 <= self.default_score <= 1:
            yield f"default_score={self.default_score}: must be 0 to 1"
        for field_name, least in (
            ("max_concurrent", 1),
            ("attempts", 1),
            ("requests_per_minute", 0),
            ("cache_size", 0),
            ("backoff_s", 0),
            ("price_per_million_prompt_tokens", 0),
            ("price_per_million_completion_tokens", 0),
        ):
            if not getattr(self, field_name) >= least:
                yield f"{field_name}={getattr(self, field_name)}: must be at least {least}"
        for field_name in ("request_timeout_s", "deadline_s"):
            if not getattr(self, field_name) > 0:
                yield f"{field_name}={getattr(self, field_name)}: must be above 0"
