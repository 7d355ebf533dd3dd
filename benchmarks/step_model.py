"""A model of the duration of an engine step, and the least time for a workload.

The model of a step's duration is ``base + tokens * a + prompt tokens * b + share of the cache in
use * c``. The coefficients are not negative, and fit the measured steps best (least squares). The
engine's time to accept requests counts towards the step that follows. Every schedule samples the
same tokens, accepts the same prompts and reads the same cache, so a schedule can only save steps.
It needs at least as many steps as the longest rollout has tokens, and at least as many as there
would be with full batches. The least time is computed with the larger of these two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.generation_sides import StepSample
from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The coefficients, in seconds. ``error``: mean absolute deviation of a step from the model,
    divided by the mean duration."""

    base: float
    per_token: float
    per_prompt_token: float
    per_kv_use: float
    error: float

    def seconds(self, steps: int, sums: Sequence[float]) -> float:
        """The seconds of ``steps`` steps with these sums of tokens, prompt tokens and cache use."""
        weights = (self.per_token, self.per_prompt_token, self.per_kv_use)
        return steps * self.base + sum(w * x for w, x in zip(weights, sums, strict=True))


def fit(samples: Sequence[StepSample]) -> StepModel:
    """Fit the coefficients. Terms whose best coefficient would be negative are left out."""
    rows = np.array([(1.0, s.tokens, s.prompt_tokens, s.kv_use) for s in samples])
    seconds = np.array([s.seconds + s.adding_s for s in samples])
    used = [column for column in range(4) if np.ptp(rows[:, column]) > 0 or column == 0]
    while True:
        found = np.linalg.lstsq(rows[:, used], seconds, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(np.argmin(found)))
    coefficients = np.zeros(4)
    coefficients[used] = found
    error = np.abs(rows @ coefficients - seconds).mean() / seconds.mean()
    base, per_token, per_prompt_token, per_kv_use = map(float, coefficients)
    return StepModel(
        base=base,
        per_token=per_token,
        per_prompt_token=per_prompt_token,
        per_kv_use=per_kv_use,
        error=float(error),
    )


def least_seconds(
    workload: Workload, model: StepModel, samples: Sequence[StepSample], *, max_running: int
) -> float:
    """Compute the least seconds for a workload. ``samples``: the steps of a run of this workload.
    Their sums are the work of every schedule."""
    steps = max(workload.longest_rollout, -(-workload.num_sampled // max_running))
    sums = (
        sum(s.tokens for s in samples),
        sum(s.prompt_tokens for s in samples),
        sum(s.kv_use for s in samples),
    )
    return model.seconds(steps, sums)
