"""Says in words what a run's rows show: whether it learns, what its time goes into, and what to
change first. Pure: without I/O.

The first third of the steps is compared with the last third. A difference between the two counts as
real if it is larger than `_SIGNIFICANT` standard errors of the difference of two means.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import Any

from torchtitan_rl.failures import Part
from torchtitan_rl.observability.engine import (
    GENERATOR_IDLE,
    SHARES_CORES,
    TRAINER_IDLE,
    Bottleneck,
    Overlap,
    advice,
)
from torchtitan_rl.types import RolloutStatus

MIN_STEPS = 6  # fewer steps show no trend
_SIGNIFICANT = 3.0
_MUCH = 0.5  # a share from which something is the main cause
_WORTH = 0.2  # a share of the steps' time from which saving it is worth a change
_REPLICA_STEPS = 10  # in which replicas are compared: the few logged turns of a step vary much
_SLOW_REPLICA = 1.5  # times as long for a token as the median of the other replicas
_USUAL_TEMPERATURES = (0.5, 1.3)
_MOST_FAILED = 0.1
_MOST_RUNNING = "generator.max_running_requests"
_LARGEST = 1e100


class Cause(StrEnum):
    """What may be wrong with a run."""

    FAILED_ROLLOUTS = "failed rollouts"
    GIVEN_UP = "replicas were given up"
    LEARNING_RATE = "learning rate too high"
    TEMPERATURE = "sampling temperature"
    ZERO_VARIANCE = "groups without variance"
    LENGTH_COLLAPSE = "answers get shorter and worse"
    CUT_ANSWERS = "answers reach the length limit"
    MISMATCH = "trainer and engine disagree"
    SLOW_ENVIRONMENT = "slow environment"
    SLOW_REWARD = "slow rewards"
    SLOW_REPLICA = "one slow replica"
    STARVING_TRAINER = "generation is too slow for the trainer"
    SLOW_TRAINER = "the trainer is too slow for generation"
    SMALL_BUFFER = "buffer too small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A possible fault: the figures that show it, and what to try first."""

    cause: Cause
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.cause.value}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is read of a run.

    ``steps`` and ``evaluations`` are rows of ``metrics.jsonl``, ``failures`` of ``failures.jsonl``.
    ``fields`` is the configuration by name. ``token_s`` has the seconds per token, by replica and
    step (`median_by_step`).
    """

    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    token_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    failures: Sequence[Mapping[str, Any]] = ()

    @property
    def shares_cores(self) -> bool:
        """Whether trainer and replicas compute on the same CPU cores, so that their idle shares do
        not show what limits the run."""
        return any(_values(self.steps, SHARES_CORES))


def summarize(facts: RunFacts) -> list[str]:
    """Sentences about learning and about time."""
    if not facts.steps:
        return ["no step has ended yet"]
    return [*_describe_learning(facts), *_describe_time(facts)]


def diagnose(facts: RunFacts) -> list[Diagnosis]:
    """The possible faults, the most important first; empty for a run that looks sound."""
    if len(facts.steps) < MIN_STEPS:
        return []
    learning = [found for rule in _LEARNING for found in rule(facts)]
    effects = {effect for found in learning for effect in _EFFECTS.get(found.cause, ())}
    causes = [found for found in learning if found.cause not in effects]
    limit = _limit(facts)
    return causes if limit is None else [*causes, limit]


class Verdict(StrEnum):
    """Whether a run learns."""

    YES = "yes"
    WORSE = "worse"
    UNCLEAR = "unclear"


def verdict(facts: RunFacts) -> Verdict | None:
    """Judge by the first and the last evaluation, or else by the rewards of training; None if there
    are too few of either."""
    if (ends := _ends(facts)) is not None:
        return _compare(*ends)
    reward = _Trend.of(facts.steps, "train/reward_mean")
    if reward is None:
        return None
    if not reward.is_real:
        return Verdict.UNCLEAR
    return Verdict.YES if reward.last > reward.first else Verdict.WORSE


def _ends(facts: RunFacts) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    shown = [row for row in facts.evaluations if _value(row, "evaluation/reward_mean") is not None]
    return (shown[0], shown[-1]) if len(shown) > 1 else None


def _describe_learning(facts: RunFacts) -> Iterator[str]:
    if (ends := _ends(facts)) is not None:
        first, last = ends
        yield (
            f"evaluation: reward {_with_interval(first)} at step {first['step']}, "
            f"{_with_interval(last)} at step {last['step']}: {_WORDS[_compare(first, last)]}"
        )
    if (reward := _Trend.of(facts.steps, "train/reward_mean")) is not None:
        change = "it rises" if reward.last > reward.first else "it falls"
        yield (
            f"training: reward {reward.first:.3f} in the first third of the steps, "
            f"{reward.last:.3f} in the last: {change if reward.is_real else 'no clear change'}"
        )
    parts = {
        "entropy": "trainer/entropy",
        "length of answers": "train/response_length_mean",
        "groups without variance": "train/groups_without_variance_share",
        "age of the trained tokens": "policy/staleness_mean",
    }
    texts = [
        f"{words} {trend.first:.3g} -> {trend.last:.3g}"
        for words, name in parts.items()
        if (trend := _Trend.of(facts.steps, name)) is not None
    ]
    if texts:
        yield f"first to last third: {', '.join(texts)}"


def _with_interval(row: Mapping[str, Any]) -> str:
    low, high = (_value(row, f"evaluation/reward_ci95_{end}") for end in ("low", "high"))
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return f"{row['evaluation/reward_mean']:.3f}{interval}"


_WORDS = {
    Verdict.YES: "it learns",
    Verdict.WORSE: "it gets worse",
    Verdict.UNCLEAR: "the 95 % intervals overlap, so this shows no difference yet",
}


def _compare(first: Mapping[str, Any], last: Mapping[str, Any]) -> Verdict:
    low = [_value(row, "evaluation/reward_ci95_low") for row in (first, last)]
    high = [_value(row, "evaluation/reward_ci95_high") for row in (first, last)]
    if low[1] is not None and high[0] is not None and low[1] > high[0]:
        return Verdict.YES
    if low[0] is not None and high[1] is not None and high[1] < low[0]:
        return Verdict.WORSE
    return Verdict.UNCLEAR


def times_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the time of the steps goes into, in seconds."""
    parts = {
        "waiting for rollouts": "time/rollout_s",
        "training": "time/train_s",
        "switching devices": "time/switch_s",
    }
    times = {words: sum(_values(steps, name)) for words, name in parts.items()}
    rest_s = sum(_values(steps, "time/step_s")) - sum(times.values())
    return times | {"publishing, checkpoints and the rest": max(0.0, rest_s)}


def _describe_time(facts: RunFacts) -> Iterator[str]:
    total_s = sum(_values(facts.steps, "time/step_s"))
    if not total_s:
        return
    shares = {words: seconds / total_s for words, seconds in times_of(facts.steps).items()}
    texts = [f"{words} {share:.0%}" for words, share in shares.items() if share >= 0.01]
    yield f"time of the steps: {', '.join(texts)}"
    if phases := _phases(facts.steps):
        texts = [f"{phase} {share:.0%}" for phase, share in phases.items()]
        yield f"time of a rollout: {', '.join(texts)}"
    if _limit(facts) is None and (text := speed_advice(facts)) is not None:
        yield text


def _limit(facts: RunFacts) -> Diagnosis | None:
    """The fault that limits the speed."""
    if len(facts.steps) < MIN_STEPS:
        return None
    return next((one for rule in _SPEED for one in rule(facts)), None)


def speed_advice(facts: RunFacts) -> str | None:
    """What limits the speed, and what to change first; None if idle shares do not show it."""
    if (found := _limit(facts)) is not None:
        return f"{found.what}; {found.fix}"
    overlap = mean_overlap(facts.steps)
    if overlap is None or facts.shares_cores:
        return None
    return advice(overlap, staleness=_staleness(facts))


def _failed_rollouts(facts: RunFacts) -> Iterator[Diagnosis]:
    failed = {one: _ended_share(facts, one) for one in RolloutStatus if one.is_failure}
    share = sum(failed.values())
    if share > _MOST_FAILED:
        worst = max(failed, key=lambda status: failed[status])
        yield Diagnosis(
            cause=Cause.FAILED_ROLLOUTS,
            what=f"{share:.0%} of the rollouts failed, most of them with {worst}",
            fix="read the field cause in rollouts.jsonl; failed rollouts are not trained on",
        )


def _given_up(facts: RunFacts) -> Iterator[Diagnosis]:
    numbers = _values(facts.steps, "engine/replicas")
    given_up = any(
        row.get("part") == Part.REPLICA and row.get("given_up") for row in facts.failures
    )
    if given_up and numbers[-1:] < [max(numbers, default=0.0)]:
        yield Diagnosis(
            cause=Cause.GIVEN_UP,
            what=f"the run has {numbers[-1]:.0f} of {max(numbers):.0f} replicas",
            fix="add others with `torchtitan-rl scale`; a resumed run has all of them again",
        )


def _ended_share(facts: RunFacts, status: RolloutStatus) -> float:
    """The share of the rollouts that ended with this status."""
    total = sum(_values(facts.steps, "train/rollouts"))
    return sum(_values(facts.steps, f"train/ended_{status}")) / total if total else 0.0


def _learning_rate(facts: RunFacts) -> Iterator[Diagnosis]:
    rate = _value(facts.fields, "trainer.optimizer.learning_rate")
    for best, last in _falls(facts.steps):
        if last.entropy < 0.4 * best.entropy or last.entropy > 2.0 * best.entropy:
            yield Diagnosis(
                cause=Cause.LEARNING_RATE,
                what=f"the reward fell from {best.reward:.3f} to {last.reward:.3f}, while the "
                f"entropy {'fell' if last.entropy < best.entropy else 'rose'} from "
                f"{best.entropy:.3g} to {last.entropy:.3g} nats: the updates destroyed what the "
                "policy could do",
                fix="start again from the initial policy, with trainer.optimizer.learning_rate "
                + ("a smaller one" if rate is None else f"{rate / 10:g}"),
            )
            return


def _temperature(facts: RunFacts) -> Iterator[Diagnosis]:
    value = _value(facts.fields, "rollout.sampling.temperature")
    low, high = _USUAL_TEMPERATURES
    if value is None or low <= value <= high:
        return
    entropy = _Trend.of(facts.steps, "trainer/entropy")
    flat = _Trend.of(facts.steps, "train/groups_without_variance_share")
    figures = [f"entropy {entropy.first:.3g} nats" if entropy else ""]
    figures.append(f"{flat.first:.0%} of the groups without variance" if flat else "")
    yield Diagnosis(
        cause=Cause.TEMPERATURE,
        what=f"rollout.sampling.temperature is {value:g} ({', '.join(filter(None, figures))}): "
        + (
            "the rollouts of a problem are nearly equal, so there is little to compare"
            if value < low
            else "tokens are drawn nearly at random, so good answers are rare"
        ),
        fix="try 1.0, at which the policy is sampled as it is",
    )


def _zero_variance(facts: RunFacts) -> Iterator[Diagnosis]:
    flat = _Trend.of(facts.steps, "train/groups_without_variance_share")
    reward = _Trend.of(facts.steps, "train/reward_mean")
    if flat is None or reward is None or flat.last < 0.8:
        return
    top = max(_values(facts.steps, "train/reward_max") or [0.0])
    is_learned = reward.last > max(0.0, 0.9 * top) or (
        reward.is_real and reward.last > reward.first
    )
    yield Diagnosis(
        cause=Cause.ZERO_VARIANCE,
        what=f"the rewards of {flat.last:.0%} of the groups are all equal (mean "
        f"{reward.last:.3f}); only differences between the rewards of a group teach the policy "
        "anything",
        fix="it has learned what these problems teach: end the run, or give harder ones"
        if is_learned
        else "the problems are too hard, or the reward is too coarse: give easier problems, "
        "rewards for partial success, or a larger rollout.group_size",
    )


def _length_collapse(facts: RunFacts) -> Iterator[Diagnosis]:
    for best, last in _falls(facts.steps):
        if last.length < 0.5 * best.length:
            yield Diagnosis(
                cause=Cause.LENGTH_COLLAPSE,
                what=f"answers have {last.length:.0f} tokens instead of {best.length:.0f}, and the "
                f"reward fell from {best.reward:.3f} to {last.reward:.3f}",
                fix="look for a penalty or loss that favours short answers (rollout.overlong, "
                "trainer.loss), and for a reward that an empty answer gets; if there is none, "
                "lower trainer.optimizer.learning_rate",
            )
            return


def _cut_answers(facts: RunFacts) -> Iterator[Diagnosis]:
    share = _ended_share(facts, RolloutStatus.MAX_TOKENS)
    if share > _MUCH:
        yield Diagnosis(
            cause=Cause.CUT_ANSWERS,
            what=f"{share:.0%} of the rollouts reached the limit of tokens",
            fix="raise rollout.max_total_tokens and rollout.sampling.max_tokens_per_turn",
        )


def _mismatch(facts: RunFacts) -> Iterator[Diagnosis]:
    values = _values(facts.steps, "trainer/age_0/logprob_diff_mean")
    if values and median(values) > 0.1:
        yield Diagnosis(
            cause=Cause.MISMATCH,
            what=f"with the same weights, trainer and engine give a token logprobs that differ by "
            f"{median(values):.2g} nats on average: the gradient is not that of the policy that "
            "sampled",
            fix="see the table of docs/debugging.md",
        )


def _slow_rollouts(facts: RunFacts) -> Iterator[Diagnosis]:
    waiting_s = sum(_values(facts.steps, "time/rollout_s"))
    waiting = waiting_s / (sum(_values(facts.steps, "time/step_s")) or math.inf)
    fixes = {
        "environment": (
            Cause.SLOW_ENVIRONMENT,
            "make the calls and the scoring of the environment or agent faster, or let more "
            "rollouts run at the same time"
            + "; with schedule.staleness 1, the trainer works meanwhile"
            * (not _staleness(facts)),
        ),
        "reward": (Cause.SLOW_REWARD, "make the reward faster or concurrent"),
    }
    for phase, share in _phases(facts.steps).items():
        if phase in fixes and share >= _MUCH and share * waiting >= _WORTH:
            cause, fix = fixes[phase]
            yield Diagnosis(
                cause=cause,
                what=f"the trainer waits for rollouts {waiting:.0%} of the time, and rollouts wait "
                f"{share:.0%} of their time for the {phase}: without it, steps would be up to "
                f"{share * waiting:.0%} shorter",
                fix=fix,
            )


def _slow_replica(facts: RunFacts) -> Iterator[Diagnosis]:
    token_s = {name: of for name, of in facts.token_s.items() if len(of) >= _REPLICA_STEPS}
    if len(token_s) < 2:
        return
    slowest = max(token_s, key=lambda name: median(token_s[name].values()))
    own = token_s.pop(slowest)
    # Of the same steps, because the load of the machine varies.
    others = {step: [of[step] for of in token_s.values() if step in of] for step in own}
    pairs = [(own[step], median(all_s)) for step, all_s in others.items() if all_s]
    logs = [math.log(own_s / usual_s) for own_s, usual_s in pairs]
    if len(logs) < _REPLICA_STEPS or fmean(logs) < math.log(_SLOW_REPLICA):
        return
    if fmean(logs) > _SIGNIFICANT * stdev(logs) / math.sqrt(len(logs)):
        own_ms, usual_ms = (1000 * median(all_s) for all_s in zip(*pairs, strict=True))
        yield Diagnosis(
            cause=Cause.SLOW_REPLICA,
            what=f"{slowest} takes {own_ms:.1f} ms for a token, the others {usual_ms:.1f} ms in "
            "the same steps",
            fix="look for other work on its device or cores",
        )


def _overlapping(facts: RunFacts) -> Iterator[Diagnosis]:
    overlap, staleness = mean_overlap(facts.steps), _staleness(facts)
    if overlap is None or staleness == 0 or facts.shares_cores:
        return
    trainer, generator = overlap.trainer_idle_share, overlap.generator_idle_share
    if max(trainer, generator) <= 0.4:
        return
    match overlap.bottleneck:
        case Bottleneck.GENERATOR:
            queued, running = (
                fmean(_values(facts.steps, f"engine/{name}_mean") or [0.0])
                for name in ("waiting", "running")
            )
            fix, most = "", _value(facts.fields, _MOST_RUNNING)
            if queued > _MUCH * running:
                now = "" if most is None else f" ({most:g} now)"
                fix = (
                    f"raise {_MOST_RUNNING}{now}, because {queued:.0f} requests wait in the "
                    f"engines' queues while {running:.0f} run; or "
                )
            yield Diagnosis(
                cause=Cause.STARVING_TRAINER,
                what=f"the trainer waits {trainer:.0%} of the time, while the replicas are busy",
                fix=f"{fix}give generation more devices (generator.replicas)",
            )
        case Bottleneck.TRAINER:
            yield Diagnosis(
                cause=Cause.SLOW_TRAINER,
                what=f"replicas have nothing to do {generator:.0%} of the time, while the trainer "
                "is busy",
                fix="give the trainer more devices (trainer.data_parallel_shard)",
            )
        case Bottleneck.WAITING:
            yield Diagnosis(
                cause=Cause.SMALL_BUFFER,
                what=f"the trainer waits {trainer:.0%} of the time and the replicas "
                f"{generator:.0%}: neither may work far enough ahead of the other",
                fix=f"raise schedule.staleness ({staleness}) or rollout.groups_per_step; if a few "
                "long rollouts hold up each step, raise schedule.max_overtaking_share",
            )


_LEARNING = (
    *(_failed_rollouts, _given_up, _learning_rate, _temperature, _zero_variance),
    *(_length_collapse, _cut_answers, _mismatch),
)
_SPEED = (_slow_rollouts, _slow_replica, _overlapping)
_EFFECTS = {
    Cause.LEARNING_RATE: {Cause.ZERO_VARIANCE, Cause.CUT_ANSWERS},
    Cause.LENGTH_COLLAPSE: {Cause.LEARNING_RATE, Cause.ZERO_VARIANCE},
    Cause.TEMPERATURE: {Cause.ZERO_VARIANCE, Cause.CUT_ANSWERS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trend:
    """The means of a metric over the first and the last third of the steps."""

    first: float
    last: float
    is_real: bool

    @staticmethod
    def of(steps: Sequence[Mapping[str, Any]], name: str) -> _Trend | None:
        values = _values(steps, name)
        if len(values) < MIN_STEPS:
            return None
        first, _, last = _thirds(values)
        before, after = fmean(first), fmean(last)
        # The standard error of the difference of two means.
        error = math.sqrt(sum(stdev(part) ** 2 / len(part) for part in (first, last)))
        is_real = abs(after - before) > _SIGNIFICANT * error
        return _Trend(first=before, last=after, is_real=is_real)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Means over some steps, NaN if unknown. ``error`` is the standard error of the reward."""

    reward: float
    error: float
    entropy: float
    length: float

    @staticmethod
    def of(steps: Sequence[Mapping[str, Any]]) -> _Level:
        rewards, *others = (
            _values(steps, name)
            for name in ("train/reward_mean", "trainer/entropy", "train/response_length_mean")
        )
        if len(rewards) > 1:
            error = stdev(rewards) / math.sqrt(len(rewards))
        else:  # siblings are alike, so a step has no more independent rewards than groups
            spread, groups = (_values(steps, f"train/{name}") for name in ("reward_std", "groups"))
            error = spread[0] / math.sqrt(groups[0]) if spread and sum(groups) > 0 else math.nan
        reward, entropy, length = (fmean(of or [math.nan]) for of in (rewards, *others))
        return _Level(reward=reward, error=error, entropy=entropy, length=length)


def _falls(steps: Sequence[Mapping[str, Any]]) -> list[tuple[_Level, _Level]]:
    """What the policy was like before its reward really fell, the best first, and in the last third
    of the steps.

    The first step is looked at alone: far too large an update destroys the policy at once.
    """
    first, middle, last = map(_Level.of, _thirds(steps))
    found = [
        before
        for before in (_Level.of(steps[:1]), first, middle)
        if before.reward - last.reward > _SIGNIFICANT * math.hypot(before.error, last.error)
    ]
    return [(one, last) for one in sorted(found, key=lambda one: one.reward, reverse=True)]


def _thirds(values: Sequence[Any]) -> list[Sequence[Any]]:
    size = len(values) // 3
    return [values[:size], values[size:-size], values[-size:]]


def _phases(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The shares of a rollout's time by phase. Generation is divided into the time in the engines'
    queues and the rest."""
    rows = list(steps)
    seconds = {
        phase: fmean(values)
        for phase in ("environment", "generation", "reward", "teacher")
        if (values := _values(rows, f"train/phase_s/{phase}_mean"))
    }
    names = ("train/generation/queue_s_mean", "train/turns_mean")
    queue_s, turns = (fmean(_values(rows, name) or [0.0]) for name in names)
    if queued_s := min(queue_s * turns, seconds.get("generation", 0.0)):
        seconds |= {"generation": seconds["generation"] - queued_s, "queue": queued_s}
    total = sum(seconds.values())
    return {phase: value / total for phase, value in seconds.items()} if total else {}


def mean_overlap(steps: Sequence[Mapping[str, Any]]) -> Overlap | None:
    """The idle shares of all steps' time, without the first step, in which engines warm up."""
    names = ("time/step_s", TRAINER_IDLE, GENERATOR_IDLE)
    rows = [[_value(row, name) for name in names] for row in steps[1:]]
    known = [[value for value in row if value is not None] for row in rows if None not in row]
    step_s, trainer, generator = zip(*known, strict=True) if known else ((), (), ())
    if not sum(step_s) > 0:
        return None
    return Overlap(
        trainer_idle_share=fmean(trainer, step_s), generator_idle_share=fmean(generator, step_s)
    )


def _staleness(facts: RunFacts) -> int:
    value = facts.fields.get("schedule.staleness", 0)
    return value if isinstance(value, int) else 0


def _values(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := _value(row, name)) is not None]


def _value(row: Mapping[str, Any], name: str) -> float | None:
    return finite(row.get(name))


def median_by_step(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The median of the values of each step, from pairs of a step and a value."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for step, value in values:
        found[step].append(value)
    return {step: median(all_of) for step, all_of in found.items()}


def finite(value: object) -> float | None:
    """A value of a file as a float, or ``None`` if it is not a number, or so large that the square
    of it would not be finite."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None
