import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from tests.fast.observability.test_step_metrics import make_record
from torchtitan_rl.aio import background
from torchtitan_rl.config.plan import ProcessPlan
from torchtitan_rl.config.run import MetricsConfig, PolicyConfig, RunConfig
from torchtitan_rl.errors import DeadlineError, ReplicaError
from torchtitan_rl.failures import Failure, Part
from torchtitan_rl.observability.engine import EngineSampler
from torchtitan_rl.observability.failures import (
    failure_errors,
    number_in,
    read_failures,
    summarize_failures,
)
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.config import ScheduleConfig
from torchtitan_rl.orchestration.records import BufferStates, LedgerTotals, StepRecord
from torchtitan_rl.types import EngineStats, RolloutStatus


def make_config(output_dir: Path, *, staleness: int) -> RunConfig:
    return RunConfig(
        policy=PolicyConfig(checkpoint="none"),
        task=None,  # type: ignore[arg-type]  # the recorder has no need of it
        output_dir=output_dir,
        num_steps=9,
        schedule=ScheduleConfig(staleness=staleness),
        metrics=MetricsConfig(trackers=(), progress="plain"),
    )


def asynchronous_record() -> StepRecord:
    return replace(
        make_record({"loss": 0.5}),
        wall_s=10.0,
        trainer_busy_s=4.0,
        buffer=BufferStates(waiting=0, running=20, finished=7, batched=4, capacity=31),
    )


def record_one(recorder: RunRecorder) -> None:
    recorder.record_step(asynchronous_record())


async def busy() -> dict[str, EngineStats]:
    stats = EngineStats(
        version=0,
        running=2,
        waiting=0,
        kv_use=0.0,
        preemptions=0,
        generated_tokens=0,
        tokens_per_second=0.0,
        steps=0,
    )
    return {"replica0": stats}


ON_A_CPU = ProcessPlan(device="cpu", replicas=())


def record_run(
    config: RunConfig,
    *acts: Callable[[RunRecorder], None],
    plan: ProcessPlan = ON_A_CPU,
    resume_step: int | None = None,
    ending: str = "",
) -> list[dict[str, Any]]:
    """A recorder whose engines were read at least once before each act; returns metrics.jsonl."""

    async def run() -> None:
        sampler = EngineSampler(busy, interval_s=0.0)
        async with (
            RunRecorder(config, plan, resume_step=resume_step) as recorder,
            background(sampler.run()),
        ):
            recorder.engines = sampler
            for act in acts:
                await asyncio.sleep(0.02)
                act(recorder)
        print(
            "\n".join(
                recorder.summarize(ending, resume_command="resume", checkpoint="no checkpoint")
            )
        )

    asyncio.run(run())
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_asynchronous_step_is_recorded_and_shown_with_its_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, staleness=2)
    row, *_ = record_run(config, *[record_one] * 11)
    assert row["overlap/trainer_idle_share"] == pytest.approx(0.6)
    assert row["overlap/generator_idle_share"] == 0.0
    assert row["overlap/efficiency"] == 1.0
    assert row["time/step_s"] == 10.0
    assert row["buffer/finished"] == 7
    out = capsys.readouterr().out
    assert "age 0.0  ready 7/31  idle 60%+0%" in out
    assert "generation is the bottleneck: the trainer waits 60% of the time" in out


def test_failed_rollouts_are_in_each_step_line_and_their_first_cause_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = asynchronous_record()
    (group,) = record.groups
    failed = make_rollout(None, status=RolloutStatus.ENV_ERROR)
    failed = replace(failed, cause="tools need endpoint.tool_call_parser")
    groups = (replace(group, rollouts=(*group.rollouts, failed)),)

    def fail_one(recorder: RunRecorder) -> None:
        recorder.record_step(replace(record, groups=groups))

    def fail_all(recorder: RunRecorder) -> None:  # of which the controller tells
        nothing = replace(record.tokens, trained=0)
        recorder.record_step(replace(record, groups=groups, tokens=nothing))

    record_run(make_config(tmp_path, staleness=0), fail_all, fail_one, fail_one, record_one)
    out = capsys.readouterr().out
    assert out.count("  1 failed") == 3
    assert out.count("1 of 2 rollouts failed: env_error: tools need endpoint.tool_call_parser") == 1


@pytest.mark.parametrize(
    ("device", "name", "most"),
    [
        ("cpu", "trainer/age_0/logprob_diff_max", 1e-3),  # float32
        ("cuda", "trainer/age_0/logprob_diff_mean", 0.1),  # bfloat16, single tokens differ by 0.3
    ],
)
def test_logprobs_of_trainer_and_generator_that_disagree_are_warned_of_once_and_at_the_end(
    device: Literal["cpu", "cuda"],
    name: str,
    most: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def with_difference(value: float) -> Callable[[RunRecorder], None]:
        measured = {name.removeprefix("trainer/"): value, "age_1/logprob_diff_max": 9.0}
        record = replace(asynchronous_record(), trainer=measured)
        return lambda recorder: recorder.record_step(record)

    plan, config = replace(ON_A_CPU, device=device), make_config(tmp_path, staleness=2)
    record_run(config, with_difference(most), record_one, plan=plan)
    assert "warning" not in capsys.readouterr().out
    record_run(config, *map(with_difference, (most, 2 * most, 3 * most)), plan=plan)
    during, after = capsys.readouterr().out.split("done: ")
    warning = f"warning: step 8: {name} is {2 * most:g}, above {most:g}: "
    assert (during.count(warning), after.count(warning)) == (1, 1)


def test_a_resumed_runs_last_line_counts_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, staleness=0)

    def headline(ending: str, resume_step: int | None, *acts: Callable[[RunRecorder], None]) -> str:
        record_run(config, *acts, resume_step=resume_step, ending=ending)
        lines = capsys.readouterr().out.splitlines()
        line = next(line for line in lines if line.startswith(ending or "done"))
        assert ("no checkpoint" in lines) == bool(ending)
        return re.sub(r"\d+:\d\d", "TIME", line)

    assert headline("", None, record_one) == "done: 8 steps in TIME"
    assert headline("", 7, record_one) == "done: 1 step in TIME, up to step 8"
    assert headline("failed", 7, record_one) == "failed after step 8 of 9; 1 step in TIME"
    assert headline("failed", 7) == "failed after step 7 of 9; 0 steps in TIME"
    assert headline("failed", None) == "failed before the end of step 1 of 9; 0 steps in TIME"


def test_the_last_lines_name_what_the_run_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, staleness=0)
    record_run(config)
    assert "rollouts: " not in capsys.readouterr().out  # fine-tuning has none
    (config.run_dir / "adapter").mkdir()
    record_run(config, record_one)
    out = capsys.readouterr().out
    assert f"adapter: {config.run_dir / 'adapter'}\n" in out
    assert f"rollouts: {config.run_dir / 'rollouts.jsonl'}\n" in out


def test_the_last_lines_say_what_became_of_the_tokens_and_show_the_best_and_the_worst_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = replace(make_turn((1,), (2,)), text="\x1b[2Jgone\n" + 500 * "x")
    best = replace(
        make_rollout(1.0, hostile), messages=({"role": "user", "content": "Sort\x07 these."},)
    )
    record = replace(
        asynchronous_record(),
        groups=(make_group(best, make_rollout(0.25)),),
        totals=LedgerTotals(
            tokens_generated=1000,
            tokens_trained=700,
            tokens_masked={"loss_mask": 100},
            tokens_discarded={"rolled_back": 150, "restarted": 50},
            tokens_buffered=0,
            groups_admitted=1,
            groups_trained=1,
            groups_discarded={},
            groups_buffered=0,
        ),
    )
    record_run(make_config(tmp_path, staleness=2), lambda recorder: recorder.record_step(record))
    lines = capsys.readouterr().out.partition("done: ")[2].splitlines()
    assert (
        "tokens: 1,000 sampled: 700 trained, 100 left out of the loss (loss_mask 100), "
        "200 thrown away (rolled_back 150, restarted 50)"
    ) in lines
    at = lines.index("best rollout of step 8: reward 1.000, completed, 'r'")
    assert lines[at + 1] == r"  first message: 'Sort\x07 these.'"
    assert lines[at + 2].startswith(r"  last answer: '\x1b[2Jgone\nxxx")
    assert len(lines[at + 2]) < 200
    assert "worst rollout of step 8: reward 0.250, completed, 'r'" in lines
    assert all(line.isprintable() for line in lines)


def test_a_failure_is_shown_and_is_in_its_file_the_metrics_and_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ReplicaError("replica1 was killed")
    error.silent_s = 0.25
    lost = Failure.of(Part.REPLICA, "replica1", error, now_s=100.0)
    served = lost.restarted("replica1-2", now_s=110.0).serving(now_s=112.5)
    served = replace(served, tokens_again=40)
    given_up = Failure.of(Part.TRAINER, "trainer", DeadlineError("late"), now_s=1.0)
    given_up = replace(given_up.ended("after 2 restarts"), steps_again=3)
    config = make_config(tmp_path, staleness=0)

    def fail(recorder: RunRecorder) -> None:
        recorder.record_failure(served)
        recorder.record_failure(given_up)

    *_, row = record_run(config, record_one, fail, record_one)
    assert row["failures/replica/number"] == 1
    assert row["failures/replica/serve_s"] == 12.5
    assert row["failures/trainer/steps_again"] == 3
    said = capsys.readouterr().out
    assert "failure of replica1: seen as error 0.25 s after the last sign of life, " in said
    rows = read_failures(config.run_dir)
    assert [one["part"] for one in rows] == ["replica", "trainer"]
    assert [one["sign"] for one in rows] == ["error", "no answer"]
    assert number_in(row) == len(rows)
    assert rows[0]["successor"] == "replica1-2"
    assert not [error for one in rows for error in failure_errors(one)]
    assert list(failure_errors(rows[0] | {"serve_s": None}))
    assert list(failure_errors(rows[0] | {"restart_s": 13.0}))
    first, second = summarize_failures(rows)
    assert first == (
        "replica lost 1 times (1 error), seen after 0.2 s (at most 0.2 s), restarted after 10.0 s "
        "(at most 10.0 s), served after 12.5 s (at most 12.5 s), 40 tokens sampled again"
    )
    assert second.endswith("3 steps taken again, 1 given up")
