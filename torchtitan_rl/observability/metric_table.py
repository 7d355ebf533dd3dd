"""The one table of metrics: every name that is recorded, with its unit, reduction and meaning.

`docs/metrics.md` is printed from it (``python -m torchtitan_rl.observability.metric_table``), and a
name that is not in it cannot be recorded. Names that depend on a task or a cause belong to a
family, whose name ends in ``/*``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl.types import RolloutStatus


class Split(StrEnum):
    """Whose rollouts a metric describes; part of the name."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row. ``reduction`` says how one value comes of many."""

    name: str
    unit: str
    reduction: str
    meaning: str

    @property
    def is_family(self) -> bool:
        return self.name.endswith("/*")


def _row(name: str, unit: str, reduction: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning)


_ENDINGS = {
    RolloutStatus.COMPLETED: "the environment ended them",
    RolloutStatus.MAX_TURNS: "the limit of turns was reached",
    RolloutStatus.MAX_TOKENS: "the limit of tokens was reached",
    RolloutStatus.STEP_TIMEOUT: "one call of the environment took too long",
    RolloutStatus.ROLLOUT_TIMEOUT: "the whole rollout took too long",
    RolloutStatus.ENV_ERROR: "the environment raised",
    RolloutStatus.GENERATION_ERROR: "a request was refused or its replicas were lost",
    RolloutStatus.REWARD_ERROR: "a reward function raised or gave no finite number",
    RolloutStatus.CANCELLED: "they were cancelled",
}
_GENERATION_TIMES = {
    "queue": "from the replica's inbox to the first scheduling",
    "time_to_first_token": "from the replica's inbox to the first token",
    "decode": "from the first token to the last",
    "inter_token_latency": "decode time per token after the first",
}


_STATISTICS = [
    _row(
        "reward_ci95_low",
        "reward",
        "Student's interval",
        "95 % confidence, of the mean over problems of each problem's mean reward",
    ),
    _row("reward_ci95_high", "reward", "Student's interval", "the same"),
    _row(
        "pass_at_k/*",
        "share",
        "mean over problems",
        "chance that one of k samples solves a problem (unbiased; failed rollouts do not)",
    ),
]


def _of_rollouts(split: Split) -> list[Metric]:
    """Of the rollouts of one step (train) or of one evaluation."""
    rows = [
        _row("groups", "count", "sum", "groups of sibling rollouts"),
        _row("rollouts", "count", "sum", "rollouts, failed ones included"),
        _row("reward_mean", "reward", "mean", "over rollouts that did not fail"),
        _row("reward_max", "reward", "max", "over rollouts that did not fail"),
        _row("reward_min", "reward", "min", "over rollouts that did not fail"),
        _row("reward_std", "reward", "std", "over rollouts that did not fail (population)"),
        _row(
            "groups_without_variance_share",
            "share",
            "mean",
            "groups of two or more whose rewards do not differ: they teach nothing",
        ),
        _row("turns_mean", "turns", "mean", "turns of a rollout"),
        _row("turns_max", "turns", "max", "turns of a rollout"),
        _row(
            "episodes_mean",
            "episodes",
            "mean",
            "token sequences of a rollout: 1 and one more for each edit of its history",
        ),
        _row("response_length_mean", "tokens", "mean", "sampled tokens of a rollout"),
        _row("response_length_max", "tokens", "max", "sampled tokens of a rollout"),
    ]
    rows += [
        _row(f"ended_{status.value}", "count", "sum", f"rollouts: {why}")
        for status, why in _ENDINGS.items()
    ]
    for reduction in ("mean", "max"):
        rows += [
            _row(f"generation/{name}_s_{reduction}", "s", reduction, f"per request: {meaning}")
            for name, meaning in _GENERATION_TIMES.items()
        ]
        rows.append(
            _row(
                f"generation/requests_in_flight_{reduction}",
                "requests",
                reduction,
                "held by the engine when the step that ended a request began",
            )
        )
    rows += [
        _row("generation/requests", "count", "sum", "completions, one a turn"),
        _row("generation/cached_tokens_mean", "tokens", "mean", "prompt tokens found in the cache"),
        _row("generation/cached_share", "share", "ratio of sums", "cached of all prompt tokens"),
        _row("task/*", "task's own", "mean", "numbers that the environment or rubric reports"),
    ]
    if split is Split.EVALUATION:
        rows += _STATISTICS
    return [_row(f"{split.value}/{row.name}", row.unit, row.reduction, row.meaning) for row in rows]


_AGES = {
    "age_0": "sampled under the weights that the step started from",
    "age_1": "one version older",
    "age_2": "two versions older",
    "age_3plus": "three or more versions older",
}


def _of_ages() -> list[Metric]:
    """Of a step's trained tokens by the version that they were sampled under."""
    return [
        row
        for age, which in _AGES.items()
        for row in [
            _row(f"{age}/tokens", "tokens", "sum", f"trained tokens {which}"),
            _row(f"{age}/ratio_mean", "-", "mean", "over them, as ratio_mean"),
            _row(f"{age}/ratio_max", "-", "max", "over them, as ratio_max"),
            _row(f"{age}/clip_share", "share", "mean", "over them, as clip_share"),
            _row(f"{age}/masked_share", "share", "mean", "over them, as masked_share"),
            _row(f"{age}/kl_k3", "nats", "mean", "over them, as kl_k3"),
            _row(f"{age}/effective_share", "share", "ratio", "over them, as effective_share"),
        ]
    ]


_TRAINER = [
    _row("loss", "-", "sum over the step's terms", "the policy loss, with its KL penalty"),
    _row("ratio_mean", "-", "mean", "probability ratio of the trained policy to the sampling one"),
    _row("ratio_max", "-", "max", "the same"),
    _row("clip_share", "share", "mean", "trained tokens whose ratio was clipped"),
    _row("clip_share_low", "share", "mean", "of them at the lower bound"),
    _row("clip_share_high", "share", "mean", "of them at the upper bound"),
    _row("kl_k1", "nats", "mean", "KL of the sampling policy to the trained one: -log ratio"),
    _row("kl_k3", "nats", "mean", "the same with less variance: ratio - 1 - log ratio"),
    _row("masked_share", "share", "mean", "trained tokens masked for their ratio (loss.mask)"),
    _row("effective_share", "share", "ratio", "effective sample size / trained tokens"),
    _row("weight_mean", "-", "mean", "truncated importance weight of trained tokens"),
    _row(
        "weight_capped_share", "share", "mean", "trained tokens whose importance weight was capped"
    ),
    _row("kl_reference", "nats", "mean", "KL of the policy from the initial one (kl_estimator)"),
    _row("entropy", "nats", "mean", "of the next-token distribution on trained tokens"),
    _row("logprob_diff_mean", "nats", "mean", "|trainer's - generator's logprob| of a token"),
    _row("logprob_diff_max", "nats", "max", "the same"),
    _row("grad_norm", "-", "last", "before clipping"),
    _row("learning_rate", "-", "last", "of the step"),
    _row("trained_tokens", "tokens", "sum", "tokens with loss"),
    _row("computed_tokens", "tokens", "sum", "tokens of forward passes, without padding"),
    _row("shared_share", "share", "mean", "tokens computed together with another episode's"),
    _row("padding_share", "share", "mean", "tokens of forward passes that are padding"),
    _row("masked_nonfinite", "tokens", "sum", "masked: their sampled logprob is not finite"),
    _row("clamped_log_ratio", "tokens", "sum", "log-ratio beyond the clamp before exponentiation"),
    _row("step_s", "s", "last", "forward, backward and optimizer"),
    _row(
        "tokens_per_second", "tokens/s", "last", "tokens of all episodes, shared or not, per step_s"
    ),
    *_of_ages(),
]
_PARTS = {
    "overtaken": "that younger groups overtook",
    "on_time": "that none overtook, where some were",
}
_RUN = [
    _row(
        "tokens/generated",
        "tokens",
        "sum",
        "sampled for the step's groups; equals trained + discarded",
    ),
    _row("tokens/trained", "tokens", "sum", "that had loss in this step"),
    _row("tokens/discarded", "tokens", "sum", "masked or thrown away, for whatever cause"),
    _row("tokens/discarded/*", "tokens", "sum", "masked or thrown away for this cause"),
    _row("tokens/generated_per_second", "tokens/s", "ratio", "tokens/generated per time/step_s"),
    _row("policy/version", "version", "last", "of the weights after the step"),
    _row("policy/staleness_mean", "versions", "mean", "version trained minus version sampled"),
    _row("policy/staleness_max", "versions", "max", "the same"),
    _row("policy/age_share/*", "share", "ratio", "trained tokens that are so many versions old"),
    _row("sync/publish_s", "s", "last", "the trainer makes its weights readable"),
    _row("sync/stage_s", "s", "max over replicas", "a replica fetches them while it decodes"),
    _row("sync/pull_s", "s", "max over replicas", "from asking for the swap until it is done"),
    _row("sync/pull_stall_ms_mean", "ms", "mean over replicas", "no decoding during the swap"),
    _row("sync/pull_stall_ms_max", "ms", "max over replicas", "the same"),
    _row("sync/running_requests", "requests", "sum", "in mid-generation at the swap"),
    _row("sync/lost_replicas", "replicas", "sum", "that could not follow"),
    _row("sync/lagging_replicas", "replicas", "sum", "that were not waited for, and still follow"),
    _row("sync/held_replicas", "replicas", "sum", "that validate, and follow afterwards"),
    _row("engine/replicas", "replicas", "last", "that answered"),
    _row("engine/failed_readings", "count", "sum", "times that a replica did not answer"),
    _row("engine/preemptions", "count", "sum over replicas", "since the engines started"),
    _row("engine/running_mean", "requests", "mean of sums", "on all replicas, while one works"),
    _row("engine/running_max", "requests", "max of sums", "the same"),
    _row("engine/waiting_mean", "requests", "mean of sums", "not scheduled yet, while one works"),
    _row("engine/waiting_max", "requests", "max of sums", "the same"),
    _row("engine/kv_use_mean", "share", "mean", "of a replica's KV cache, while one works"),
    _row("engine/kv_use_max", "share", "max", "the same"),
    _row("engine/tokens_per_second", "tokens/s", "mean of sums", "sampled, while one works"),
    _row("endpoint/requests", "completions", "sum", "that the endpoint's clients asked for"),
    _row("endpoint/completed", "completions", "sum", "that they were given"),
    _row("endpoint/aborted", "completions", "sum", "whose client was gone before"),
    _row("endpoint/refused/*", "completions", "sum", "not given, by the code of the error"),
    _row("endpoint/sessions/*", "sessions", "sum", "that ended, by how"),
    _row("endpoint/sessions_open", "sessions", "last", "at the end of the step"),
    _row(
        "account/sampled_tokens",
        "tokens",
        "last",
        "counted by this process's engines",
    ),
    _row("account/lost_tokens", "tokens", "last", "sampled by replicas that died, never heard of"),
    _row("account/unaccounted_tokens", "tokens", "last", "sampled and in no account: must be 0"),
    _row("time/rollout_s", "s", "last", "phase: the trainer waits for a batch of finished groups"),
    _row("time/train_s", "s", "last", "phase: batch packed, optimizer step"),
    _row("time/sync_s", "s", "sum", "weights published, fetched and pulled since the previous row"),
    _row("time/switch_s", "s", "last", "neither part had the shared devices (colocated runs)"),
    _row("time/evaluation_s", "s", "last", "phase: the fixed problems are answered"),
    _row("time/step_s", "s", "last", "wall time since the previous step was done"),
    _row("overlap/trainer_idle_share", "share", "ratio", "of the step's time the trainer waits"),
    _row("overlap/generator_idle_share", "share", "mean", "of replica time without any request"),
    _row(
        "overlap/efficiency",
        "share",
        "ratio",
        "busy time of the busier part per step time: 1 is the best that these devices allow",
    ),
    _row("buffer/waiting", "groups", "last", "admitted and not started, when the batch was taken"),
    _row("buffer/running", "groups", "last", "being rolled out"),
    _row("buffer/finished", "groups", "last", "rolled out and in no batch yet"),
    _row("buffer/batched", "groups", "last", "in the batch"),
    _row("buffer/capacity", "groups", "last", "that may be in the buffer at once"),
    *(
        row
        for part, whose in _PARTS.items()
        for row in (
            _row(f"{part}/groups", "count", "sum", f"groups of the batch {whose}"),
            _row(f"{part}/reward_mean", "reward", "mean", "of their rollouts that did not fail"),
            _row(f"{part}/response_length_mean", "tokens", "mean", "sampled tokens of a rollout"),
        )
    ),
    _row("total/tokens_generated", "tokens", "sum", "of the whole run: the four below together"),
    _row("total/tokens_trained", "tokens", "sum", "of the whole run"),
    _row("total/tokens_masked", "tokens", "sum", "in a batch, but left out of the loss by a rule"),
    _row("total/tokens_masked/*", "tokens", "sum", "the same, by rule"),
    _row("total/tokens_discarded", "tokens", "sum", "thrown away"),
    _row("total/tokens_discarded/*", "tokens", "sum", "the same, by cause"),
    _row("total/tokens_buffered", "tokens", "last", "of groups that are not trained yet"),
    _row("total/groups_admitted", "groups", "sum", "of the whole run: the three below together"),
    _row("total/groups_trained", "groups", "sum", "of the whole run"),
    _row("total/groups_discarded", "groups", "sum", "thrown away whole"),
    _row("total/groups_discarded/*", "groups", "sum", "the same, by cause"),
    _row("total/groups_buffered", "groups", "last", "not trained yet"),
    _row("controller/loop_lag_ms_mean", "ms", "mean", "lateness of the controller's event loop"),
    _row("controller/loop_lag_ms_max", "ms", "max", "the same"),
    _row("controller/hanging_calls", "calls", "last", "of environments, given up and running on"),
]

METRICS: dict[str, Metric] = {
    row.name: row
    for row in [
        *_of_rollouts(Split.TRAIN),
        *_of_rollouts(Split.EVALUATION),
        *(_row(f"trainer/{row.name}", row.unit, row.reduction, row.meaning) for row in _TRAINER),
        *_RUN,
    ]
}


def is_known(name: str) -> bool:
    """Whether ``name`` is in the table, or of one of its families."""
    if name in METRICS:
        return not METRICS[name].is_family
    return any(
        row.is_family and name.startswith(row.name[:-1]) and len(name) >= len(row.name)
        for row in METRICS.values()
    )


def check_names(names: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a name is not in the table.
    """
    unknown = sorted(name for name in names if not is_known(name))
    if unknown:
        raise ValueError(
            f"unknown metrics {unknown}: add them to torchtitan_rl/observability/metric_table.py"
        )


def to_markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Printed by `python -m torchtitan_rl.observability.metric_table > docs/metrics.md`; "
        "change the table there.",
        "",
        "Each line of `metrics.jsonl` is an object of one step: `step`, `wall_time_s` (Unix "
        "seconds), `version` (of the weights after the step), and metrics of this table; "
        "TensorBoard has the same names. A value that is not finite is `null`. `train/` "
        "describes the rollouts of a step, `evaluation/` those of the fixed problems, `trainer/` "
        "the optimizer step. A name that had nothing to describe is left out. An evaluation that "
        "ended after later steps has a line of its own, with the step whose weights it used.",
        "",
        "A line is written at the moment in which its optimizer step has ended. `sync/*` are "
        "therefore of the weights that reached the replicas since the line before, usually those "
        "of the step before; the first line has none. Of the times, `time/rollout_s` (waiting), "
        "`time/train_s`, publishing and saving add up to `time/step_s`; `time/sync_s` runs "
        "alongside them. `tokens/*` are of the groups in the step's batch; what was thrown away "
        "elsewhere (restarted groups, cut requests) is in `total/*`. `account/*` is there at "
        "checkpoints and at the end, and starts anew with each process: evaluation and clients of "
        "the endpoint count, too.",
        "",
        "| name | unit | reduction | meaning |",
        "|---|---|---|---|",
    ]
    for row in METRICS.values():
        meaning = row.meaning.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.unit} | {row.reduction} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(to_markdown(), end="")
