"""A recorded step is taken again; what cannot be is refused in one line, before any process
starts."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support.simulated_parts import Memory
from tests.support.turns import group, rollout, turn
from torchtitan_rl.commands import cli
from torchtitan_rl.commands.console import StopSignals
from torchtitan_rl.commands.replay import Replay, replay_steps
from torchtitan_rl.commands.train_only import recorded_rollouts, train_on_recorded
from torchtitan_rl.config.machine import machine_facts
from torchtitan_rl.config.prepare import claim_run, prepare_run
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.observability.metrics import step_metrics
from torchtitan_rl.observability.page_files import write_launch
from torchtitan_rl.observability.recorded import read_recorded, recorded_config
from torchtitan_rl.observability.rollouts import PerStep, RolloutLog
from torchtitan_rl.observability.sinks import MetricsLog, RowKind, Split
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.records import StepRecord
from torchtitan_rl.training.batch import StepOutput, TokenTerms, TrainingBatch
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.types import RolloutStatus

LOSS = LossConfig(importance_weight="none")  # as a run on a CPU decides
CONFIG = replace(TINY, num_steps=3, trainer=replace(TINY.trainer, loss=LOSS))
GROUPS = (
    group(rollout(turn([1, 2], [3])), rollout(turn([1, 2], [4, 5]), rollout_id="g/r1", reward=0.0)),
)
FAILED = (group(rollout(turn([1], [2]), reward=None, status=RolloutStatus.ENV_ERROR)),)


class FakeTrainer:
    """Its weights are a checksum of all batches and losses so far."""

    def __init__(self) -> None:
        self.state = 0, 0
        self.saved: dict[Path, tuple[int, int]] = {}

    async def train_step(self, batch: TrainingBatch, loss: LossConfig | None = None) -> StepOutput:
        version, weights = self.state
        for values in (batch.token_ids, batch.logprobs, batch.advantages, batch.versions):
            weights = zlib.crc32(values.tobytes(), weights)
        self.state = version + 1, zlib.crc32(repr(loss or LOSS).encode(), weights)
        columns = [np.where(batch.loss_mask, value, np.nan) for value in (-0.5, 0.25, -2.0)]
        terms = TokenTerms(logprobs=columns[0], losses=columns[1], gradients=columns[2])
        metrics = {"weights_digest": float(self.state[1]), "loss": self.state[1] / 2**32}
        return StepOutput(version=version + 1, metrics=metrics, tokens=terms)

    async def save_checkpoint(self, path: Path, _: object, *, version: int) -> None:
        assert version == self.state[0]
        self.saved[path] = self.state

    async def finish_checkpoint(self) -> None:
        return

    async def load_checkpoint(self, path: Path) -> None:
        self.state = self.saved[path]


def record(output_dir: Path, *, per_step: PerStep = "all") -> Path:
    """The folder of a run of three steps of a `FakeTrainer`; the second has nothing to train on."""
    prepared = prepare_run(replace(CONFIG, output_dir=output_dir), machine_facts())
    run_dir, trainer = prepared.config.run_dir, FakeTrainer()
    with claim_run(prepared):
        write_launch(
            run_dir, command="", resume_command="", plan=[], policy_dir=prepared.policy_dir
        )
        rollouts = RolloutLog(run_dir / "rollouts.jsonl", per_step=per_step, seed=0)
        metrics = MetricsLog(run_dir)
        for step, groups in enumerate((GROUPS, FAILED, GROUPS), start=1):
            batched = EpisodeBatcher(config=CONFIG.rollout, row_len=256)(groups)
            output = StepOutput(version=trainer.state[0])
            if batched.batch is not None:
                output = asyncio.run(trainer.train_step(batched.batch))
            row = StepRecord(
                step=step,
                version=output.version,
                groups=groups,
                tokens=batched.tokens,
                trainer=output.metrics,
                publish_s=0.0,
                rollout_s=0.0,
                train_s=0.0,
                wall_s=1.0,
            )
            logged = rollouts.record(step, output.version, groups, Split.TRAIN, batched.episodes)
            metrics.record(RowKind.STEP, step, output.version, step_metrics(row) | logged)
        rollouts.close()
        metrics.close()
    return run_dir


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays take their steps in a `FakeTrainer`."""

    async def run(replay: Replay, _: object) -> int:
        return await replay_steps(replay, cast("Any", FakeTrainer()))

    def run_now(work: Callable[[object], Coroutine[Any, Any, int]], **_: object) -> int:
        return asyncio.run(work(None))

    monkeypatch.setattr("torchtitan_rl.commands.replay._run", run)
    monkeypatch.setattr("torchtitan_rl.commands.replay.run_command", run_now)


@pytest.mark.usefixtures("without_processes")
def test_a_step_is_taken_again_from_what_came_before_and_with_another_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = record(tmp_path), tmp_path / "tokens.jsonl"
    words = ["--step", "3", "--out", str(out), "--trainer.loss.clip-high", "0.5"]
    assert cli.main(["replay", str(run_dir), *words]) == 0
    said = capsys.readouterr().out
    assert said.count("the weights equal those of the run") == 2
    assert "step 2: no token to train on" in said
    (losses,) = (line.split() for line in said.splitlines() if line.startswith("loss "))
    assert losses[1] == losses[2] != losses[3]
    assert len(out.read_text().splitlines()) == 3
    assert "rollout g/r1, reward 0:" in said


@pytest.mark.usefixtures("without_processes")
def test_weights_that_differ_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = record(tmp_path)
    change("metrics.jsonl", '"trainer/weights_digest":', '"trainer/weights_digest":1')(run_dir)
    assert cli.main(["replay", str(run_dir), "--step", "3"]) == 1
    said = capsys.readouterr().out
    assert "step 1: THE WEIGHTS DIFFER" in said
    assert "step 3: the weights equal" in said


def test_training_on_recorded_rollouts_arrives_at_the_weights_of_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, mode="train", rollouts=record(tmp_path), name="again")
    prepared = prepare_run(replace(config, output_dir=tmp_path), machine_facts())
    recorded, memory = recorded_rollouts(prepared), Memory()
    assert recorded is not None
    training = train_on_recorded(
        recorded, prepared, cast("Any", FakeTrainer()), memory, StopSignals()
    )
    asyncio.run(training)
    assert [record.version for record in memory.steps] == [1, 1, 2]
    digests = [record.trainer.get("weights_digest") for record in memory.steps]
    assert digests == [recorded.digest(step) for step in (1, 2, 3)]
    assert memory.said[-1].startswith("the weights after step 3 equal those of ")


def test_a_recorded_run_has_its_configuration_and_its_groups(tmp_path: Path) -> None:
    recorded = read_recorded(record(tmp_path))
    config, _ = recorded_config(recorded)
    for name in ("rollout", "trainer", "schedule", "seed", "num_steps", "generator"):
        assert getattr(config, name) == getattr(CONFIG, name)
    recorded.check(1, 3)
    assert [step for step, _ in recorded.steps(2, 3)] == [2, 3]
    assert recorded.checkpoint_before(3) == (0, None)


def change(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(run_dir: Path) -> None:
        text = (run_dir / name).read_text()
        assert old in text
        (run_dir / name).write_text(text.replace(old, new, 1))

    return apply


def without_step_2(run_dir: Path) -> None:
    lines = (run_dir / "rollouts.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] != 2]
    (run_dir / "rollouts.jsonl").write_text("".join(kept))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run_dir: (run_dir / "identity.json").unlink(), "no readable identity.json"),
        (lambda run_dir: (run_dir / "metrics.jsonl").unlink(), "has not taken a step yet"),
        (
            change("metrics.jsonl", '"logged/train/rollouts":2.0', '"logged/train/rollouts":{}'),
            "0 of 2",
        ),
        (lambda run_dir: (run_dir / "rollouts.jsonl").unlink(), "has no rollouts of step 1"),
        (lambda run_dir: (run_dir / "launch.json").unlink(), "give it by --policy.checkpoint"),
        (without_step_2, "has no rollouts of step 2"),
        (
            change("rollouts.jsonl", '"token_ids":[3]', '"token_ids":[4]'),
            "not as they were written",
        ),
        (change("rollouts.jsonl", '"step":1', '"step":"\\u202e"'), "is not an integer"),
        (change("rollouts.jsonl", '{"step":1', '[{"step":1'), "rollouts.jsonl, line 1: not JSON"),
        (
            change("identity.json", '"rollout.group_size": 8', '"rollout.group_size": "x"'),
            "rollout.group_size in identity.json",
        ),
        (
            change("identity.json", '"policy.fingerprint": "', '"policy.fingerprint": "0'),
            "another model",
        ),
    ],
)
def test_damaged_files_are_one_error(
    damage: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = record(tmp_path)
    damage(run_dir)
    assert cli.main(["replay", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.isprintable() or said[:-1].isprintable()
    assert message in said


def test_a_run_that_recorded_few_rollouts_is_refused_with_the_option_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = record(tmp_path, per_step=1)
    assert cli.main(["replay", str(run_dir), "--step", "2"]) == 2
    assert "of step 1 1 of 2 rollouts are recorded" in capsys.readouterr().err
    assert cli.main(["replay", str(run_dir), "--step", "4"]) == 2
    assert "step is 4: the run has taken 3 steps; give 1 to 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mode", "train"), "rollouts is None"),
        (("--rollouts", "{run_dir}"), "rollouts is {run_dir}"),
        (("--mode", "train", "--rollouts", "{run_dir}", "--num-steps", "4"), "num_steps is 4"),
        (
            ("--mode", "train", "--rollouts", "{run_dir}", "--rollout.sampling.temperature", "0.5"),
            "were sampled at 1.0",
        ),
        (("--mode", "train", "--rollouts", "/nowhere"), "rollouts is /nowhere"),
        (("--mode", "generate", "--placement", "colocated"), "placement is colocated"),
    ],
)
def test_modes_are_checked_before_the_start(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = record(tmp_path)
    given = [word.format(run_dir=run_dir) for word in words]
    steps = [] if "--num-steps" in words else ["--num-steps", "3"]
    train = ["train", "alphabet_sort_tiny", *steps, *given, "--output-dir", str(tmp_path / "more")]
    assert cli.main([*train, "--dry-run"]) == 2
    assert message.format(run_dir=run_dir) in capsys.readouterr().err


def test_the_plan_says_how_much_is_recorded_and_what_a_mode_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "alphabet_sort_tiny", "--output-dir", str(tmp_path), "--dry-run"]
    assert cli.main([*train, "--mode", "generate"]) == 0
    said = capsys.readouterr().out
    assert "recording: every rollout, at most 2.9 MiB a step and 0.40 GiB in all" in said
    assert "mode: generate; the policy does not change" in said
    assert "trainer:" not in said
    run_dir = record(tmp_path / "recorded")
    words = ["--mode", "train", "--rollouts", str(run_dir), "--num-steps", "3"]
    assert cli.main([*train, *words]) == 0
    said = capsys.readouterr().out
    assert "trainer:" in said
    assert "replica0" not in said


def test_the_plan_counts_recorded_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    for replays in ("True", "False"):
        more = ["--metrics.rollouts-per-step", "all", "--rollout.replay-routing", replays]
        train = ["train", "alphabet_sort_moe_tiny", *more, "--output-dir", str(tmp_path)]
        assert cli.main([*train, "--dry-run", "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["recorded_bytes_per_step"])
    # 2 experts in 2 layers for 256 tokens of 16 x 8 rollouts: 4 bytes, 6 characters in base64.
    assert sizes[0] - sizes[1] == 16 * 8 * 256 * 6
