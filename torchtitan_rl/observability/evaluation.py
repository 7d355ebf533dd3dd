"""Results of an evaluation: mean reward with its confidence interval, and pass@k. Also the output
of ``torchtitan-rl eval``: rollouts, ``results.json``, table and picture.

Problems are the units of all statistics: the samples of a problem share its difficulty, so they are
averaged first. All intervals are over problems, at 95 %: Student's for rewards and their
differences, Wilson's for shares. An interval says how much the mean would differ on other problems
of the same kind; two evaluations on the same problems differ by less.

A rollout is in a file, in the format of a run's ``rollouts.jsonl``, when `EvaluationLog.write`
returns. A continued evaluation runs only the failed ones again, whose later lines count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist, fmean, stdev, variance
from typing import TYPE_CHECKING, Any

from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability.rollouts import Decode, read_rollouts, rollout_to_json
from torchtitan_rl.observability.sinks import RowLog, Split
from torchtitan_rl.types import Problem, Rollout, RolloutGroup

if TYPE_CHECKING:
    from rich.table import Table


_QUANTILE = 0.975  # for two-sided intervals at 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval: mean ± t sqrt(s² / n), where t has n - 1 degrees of freedom (Student,
    "The Probable Error of a Mean", 1908). None for fewer than two values, which have no spread.

    Rewards are not normally distributed, but the mean over some tens of problems nearly is. With
    fewer problems, t makes the interval accordingly wider.
    """
    if len(values) < 2:
        return None
    mean = fmean(values)
    t = t_quantile(_QUANTILE, degrees=len(values) - 1)
    half = t * stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def t_quantile(probability: float, *, degrees: int) -> float:
    """Quantile of Student's t. The result is exact for 1 and 2 degrees of freedom. For more, it is
    the expansion around the normal quantile (Abramowitz and Stegun, 26.7.5), which is at most 0.2 %
    too small at 97.5 %."""
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**i for i, term in enumerate(terms, start=1))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples solves a problem,
    if c of n samples solved it: 1 - C(n - c, k) / C(n, k) (Chen et al., "Evaluating Large Language
    Models Trained on Code", 2021, equation 1). Raises ValueError for impossible numbers."""
    if not 1 <= k <= num_samples or not 0 <= num_solved <= num_samples:
        raise ValueError(f"pass@{k} of {num_solved} solved in {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def share_interval(values: Sequence[float], *, size: int) -> Interval | None:
    """The mean of shares between 0 and 1, one for each problem, with Wilson's score interval
    (Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927). None for
    fewer than two values, which have no spread.

    Wilson's interval is for n coin tosses. Here n is the effective sample size (Kish, "Survey
    Sampling", 1965): the number of tosses whose mean would vary as much as the mean of these
    values. n is at most ``size``, the number of all samples; if all values are equal, n is the
    number of values. So the interval stays between 0 and 1, and has a width even if all problems or
    none are solved. The quantile is Student's, because the spread is estimated from the values.
    """
    if len(values) < 2:
        return None
    mean, number = fmean(values), float(len(values))
    if sample_variance := variance(values):
        number = min(mean * (1 - mean) * number / sample_variance, size)
    t2 = t_quantile(_QUANTILE, degrees=len(values) - 1) ** 2
    middle = (mean + t2 / (2 * number)) / (1 + t2 / number)
    spread = mean * (1 - mean) / number + t2 / (4 * number**2)
    half = math.sqrt(t2 * spread) / (1 + t2 / number)
    # Rounding must not put a mean of 0 or 1 outside of its interval.
    low, high = min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half))
    return Interval(mean=mean, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemScores:
    """The samples of one problem.

    A failed rollout is left out of the mean ``reward`` (None if all failed), but counts as a sample
    that did not solve the problem.
    """

    problem_id: str
    reward: float | None
    num_samples: int
    num_solved: int


def problem_scores(groups: Sequence[RolloutGroup], *, success_reward: float) -> list[ProblemScores]:
    """The scores of each group that has a rollout."""
    scores = []
    for group in groups:
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if group.rollouts:
            scores.append(
                ProblemScores(
                    problem_id=group.problem.problem_id,
                    reward=fmean(rewards) if rewards else None,
                    num_samples=len(group.rollouts),
                    num_solved=sum(reward >= success_reward for reward in rewards),
                )
            )
    return scores


def evaluation_statistics(
    groups: Sequence[RolloutGroup], *, success_reward: float
) -> dict[str, float]:
    """Compute the metrics of one evaluation, with pass@k for `powers`. Their names lack the prefix
    ``evaluation/``."""
    scores = problem_scores(groups, success_reward=success_reward)
    metrics: dict[str, float] = {}
    if interval := mean_interval([one.reward for one in scores if one.reward is not None]):
        metrics = {"reward_ci95_low": interval.low, "reward_ci95_high": interval.high}
    for k in powers(min((one.num_samples for one in scores), default=0)):
        metrics[f"pass_at_k/{k}"] = fmean(pass_at_k(n.num_samples, n.num_solved, k) for n in scores)
    return metrics


def powers(most: int) -> list[int]:
    """List the values of k for pass@k: the powers of two up to ``most``, and ``most`` itself, which
    is the smallest number of samples of a problem."""
    found = [1 << i for i in range(most.bit_length())]
    return sorted({*found, most}) if most else []


class EvaluationLog:
    """Appends rollouts to the file ``path``. ``step`` is the checkpoint's step; ``decode`` as in
    `RolloutLog`."""

    def __init__(self, path: Path, *, step: int, decode: Decode | None = None) -> None:
        self._rows = RowLog(path, is_new=False)
        self._step = step
        self._decode = decode

    def write(self, problem: Problem, rollout: Rollout, *, version: int) -> None:
        """Raises OutputError if the file cannot be written."""
        head = {"step": self._step, "version": version, "split": Split.EVALUATION.value}
        group = RolloutGroup(group_id=rollout.group_id, problem=problem, rollouts=(rollout,))
        row = rollout_to_json(group, rollout, decode=self._decode)
        self._rows.append(head | {"chosen": "all"} | row)

    def close(self) -> None:
        self._rows.close()


def read_finished(path: Path) -> Mapping[str, Rollout]:
    """Read the rollouts that have a reward, by id; empty if the file does not exist. Raises
    OutputError if a line is not a rollout."""
    finished: dict[str, Rollout] = {}
    try:
        for _, rollout in read_rollouts(path):
            if not rollout.status.is_failure:
                finished[rollout.rollout_id] = rollout
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: {error}; repair or remove the line") from error
    return finished


Json = dict[str, Any]

_MAX_NAME_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The rollouts of one model at one temperature."""

    model: str
    temperature: float
    groups: tuple[RolloutGroup, ...]


def results(evaluated: Sequence[Evaluated], *, success_reward: float) -> list[Json]:
    """One object for each model and temperature. Differences are relative to the first object."""
    scores = [problem_scores(one.groups, success_reward=success_reward) for one in evaluated]
    found = [_result(one, of_one) for one, of_one in zip(evaluated, scores, strict=True)]
    for result, of_one in zip(found[1:], scores[1:], strict=True):
        result["difference_to_first"] = _rewards(_differences(scores[0], of_one))
    return found


def _result(evaluated: Evaluated, scores: Sequence[ProblemScores]) -> Json:
    rollouts = [rollout for group in evaluated.groups for rollout in group.rollouts]
    failed = Counter(one.status.value for one in rollouts if one.status.is_failure)
    samples = min((one.num_samples for one in scores), default=0)
    return {
        "model": evaluated.model,
        "temperature": evaluated.temperature,
        "problems": len(scores),
        "samples_per_problem": samples,
        "rollouts": len(rollouts),
        "failed": dict(failed),
        "reward": _rewards([one.reward for one in scores if one.reward is not None]),
        "avg_at_k": _shares(scores, 1),
        "pass_at_k": {str(k): _shares(scores, k) for k in powers(samples)},
        "tokens_mean": fmean(one.num_sampled_tokens for one in rollouts) if rollouts else None,
        "turns_mean": fmean(len(one.turns) for one in rollouts) if rollouts else None,
        "of_task": _parts(evaluated.groups, scores),
    }


def _differences(first: Sequence[ProblemScores], second: Sequence[ProblemScores]) -> list[float]:
    """The differences of mean rewards, for problems with a mean reward in both."""
    before = {one.problem_id: one.reward for one in first}
    pairs = ((before.get(one.problem_id), one.reward) for one in second)
    return [new - old for old, new in pairs if old is not None and new is not None]


def _rewards(values: Sequence[float]) -> Json | None:
    return _as_json(values, mean_interval(values)) if values else None


def _shares(scores: Sequence[ProblemScores], k: int) -> Json | None:
    """Compute pass@k. For k = 1 this is the mean share of solved samples (avg@k)."""
    if not scores:
        return None
    shares = [pass_at_k(one.num_samples, one.num_solved, k) for one in scores]
    return _as_json(shares, share_interval(shares, size=sum(one.num_samples for one in scores)))


def _as_json(values: Sequence[float], interval: Interval | None) -> Json:
    """Convert a mean to JSON; without an interval, as for a single problem, only the mean."""
    if interval is None:
        return {"mean": fmean(values)}
    return {"mean": interval.mean, "ci95_low": interval.low, "ci95_high": interval.high}


def _parts(groups: Sequence[RolloutGroup], scores: Sequence[ProblemScores]) -> Json:
    parts = {group.problem.problem_id: group.problem.task for group in groups}
    found: Json = {}
    for part in sorted({part for part in parts.values() if part}):
        own = [one for one in scores if parts[one.problem_id] == part]
        found[part] = {
            "problems": len(own),
            "reward": _rewards([one.reward for one in own if one.reward is not None]),
            "avg_at_k": _shares(own, 1),
        }
    return found


def result_table(rows: Sequence[Mapping[str, Any]], *, width: int) -> Table:
    """Make the table for a terminal of this width, with a row for each of `results`. If this table
    is too wide, it has a row for each number instead."""
    from rich.table import Table
    from rich.text import Text

    names, cells = _figures(rows)
    if _least_width(names, cells) > width:
        cells = [
            [*row[:2], name, text]
            for row in cells
            for name, text in zip(names[2:], row[2:], strict=True)
        ]
        names = [*names[:2], "", "value"]
    table = Table(caption="95 % intervals over problems", caption_justify="left")
    longest = max(len(row[0]) for row in (names, *cells))
    table.add_column(names[0], width=min(longest, _MAX_NAME_WIDTH), overflow="fold")
    for column, name in enumerate(names[1:], start=1):
        is_word = not any(" " in row[column] for row in cells)
        table.add_column(name, justify="right", no_wrap=is_word)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _figures(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    ks = sorted({int(k) for row in rows for k in row["pass_at_k"]} - {1})
    samples = max((row["samples_per_problem"] for row in rows), default=0)
    is_compared, has_failed = len(rows) > 1, any(row["failed"] for row in rows)
    names = ["model", "temperature", "reward", f"avg@{samples}", *(f"pass@{k}" for k in ks)]
    cells = []
    for row in rows:
        texts = [row["model"], f"{row['temperature']:g}", _cell(row["reward"])]
        texts.append(_cell(row["avg_at_k"]))
        texts += [_cell(row["pass_at_k"].get(str(k))) for k in ks]
        if is_compared:
            texts.append(_cell(row.get("difference_to_first"), sign="+"))
        if has_failed:
            texts.append(str(sum(row["failed"].values())))
        cells.append(texts)
    return names + ["difference"] * is_compared + ["failed"] * has_failed, cells


def _least_width(names: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """The least width of a table, if texts are broken between words."""
    columns = zip(names, *cells, strict=True)
    words = [[word for text in column for word in text.split()] for column in columns]
    return sum(max(map(len, of_column)) + len(" | ") for of_column in words) + 1


def _cell(value: Mapping[str, float] | None, *, sign: str = "") -> str:
    """``0.518 [0.431, 0.604]``"""
    if value is None:
        return "-"
    text = f"{value['mean']:{sign}.3f}"
    if "ci95_low" in value:
        text += f" [{value['ci95_low']:{sign}.3f}, {value['ci95_high']:{sign}.3f}]"
    return text


PICTURE_MISSING = "no picture: matplotlib is not installed; pip install 'torchtitan-rl[plots]'"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw `results`: the rewards side by side and, if problems have several samples, pass@k.
    Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure

    has_curves = any(len(row["pass_at_k"]) > 1 for row in rows)
    figure = Figure(figsize=(10 if has_curves else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if has_curves else 1, squeeze=False)[0]
    names = list(dict.fromkeys(row["model"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    for number, temperature in enumerate(temperatures):
        shift = (number - (len(temperatures) - 1) / 2) * 0.15
        own = [row for row in rows if row["temperature"] == temperature and row["reward"]]
        places = [names.index(row["model"]) + shift for row in own]
        _intervals(axes[0], places, [row["reward"] for row in own], f"temperature {temperature:g}")
    axes[0].set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes[0].set_ylabel("mean reward, 95 % interval")
    axes[0].legend()
    if has_curves:
        for row in rows:
            ks = [int(k) for k in row["pass_at_k"]]
            label = f"{row['model']}, temperature {row['temperature']:g}"
            _intervals(axes[1], ks, list(row["pass_at_k"].values()), label, line="-")
        all_ks = sorted({int(k) for row in rows for k in row["pass_at_k"]})
        axes[1].set_xscale("log", base=2)
        axes[1].set_xticks(all_ks, map(str, all_ks))
        axes[1].set_xlabel("k")
        axes[1].set_ylabel("pass@k")
        axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _intervals(
    axis: Any,
    places: Sequence[float],
    values: Sequence[Mapping[str, float]],
    label: str,
    *,
    line: str = "",
) -> None:
    means = [value["mean"] for value in values]
    low = [value["mean"] - value.get("ci95_low", value["mean"]) for value in values]
    high = [value.get("ci95_high", value["mean"]) - value["mean"] for value in values]
    axis.errorbar(places, means, yerr=[low, high], fmt=f"o{line}", capsize=3, label=label)
