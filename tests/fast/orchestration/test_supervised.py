"""The controller of runs on conversations: steps, evaluations, resumes, references of pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.conversations import (
    Life,
    conversation,
    examples_file,
    live,
    pairs_file,
    write_rows,
)
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.config.supervised import DpoConfig, SftConfig
from torchtitan_rl.data.conversations import ExamplesConfig, PairsConfig
from torchtitan_rl.data.rows import DataError
from torchtitan_rl.environments.supervised import HeldOutConfig
from torchtitan_rl.errors import NothingTrainedError, TrainerLostError
from torchtitan_rl.orchestration.config import CheckpointConfig
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.supervised import REFERENCES
from torchtitan_rl.training.batch import PreferenceLoss, SupervisedLoss
from torchtitan_rl.training.config import TrainerConfig


def sft(folder: Path, *, rows: int = 10, **fields: Any) -> RunConfig:
    data = examples_file(folder / "train.jsonl", rows)
    examples = ExamplesConfig(train=(data,), per_step=4, renderer="chatml")
    held_out = HeldOutConfig(files=(examples_file(folder / "held.jsonl", 6, 100),), every=2)
    return SftConfig(
        policy=PolicyConfig(checkpoint="policy"),
        output_dir=folder,
        epochs=2,
        examples=examples,
        held_out=held_out,
        **fields,
    ).run()


def dpo(folder: Path, name: str = "run", **fields: Any) -> RunConfig:
    data = pairs_file(folder / "train.jsonl")
    return DpoConfig(
        policy=PolicyConfig(checkpoint="policy"),
        name=name,
        output_dir=folder,
        epochs=2,
        beta=0.2,
        pairs=PairsConfig(train=(data,), per_step=4, renderer="chatml"),
        held_out=HeldOutConfig(files=(pairs_file(folder / "held.jsonl", 3, 50),)),
        **fields,
    ).run()


def finished(config: RunConfig, **options: Any) -> Life:
    life, error = live(config, **options)
    if error is not None:
        raise error
    return life


def test_two_epochs_use_each_row_twice_and_are_evaluated(tmp_path: Path) -> None:
    config = sft(tmp_path)
    life = finished(config)
    assert config.num_steps == 5  # of 4 of 10 rows
    assert [len(batch.episode_lengths) for batch in life.trainer.batches] == [4] * 5
    texts = sorted(
        batch.token_ids[start : start + length].tobytes()
        for batch in life.trainer.batches
        for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True)
    )
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) == 10
    assert all(isinstance(loss, SupervisedLoss) for loss in life.trainer.losses)
    assert [record.step for record in life.recorder.held_out] == [0, 2, 4, 5]
    assert {record.metrics["rows"] for record in life.recorder.held_out} == {6.0}
    steps = life.recorder.steps
    assert [(record.step, record.version) for record in steps] == [(n, n) for n in range(1, 6)]
    assert all(record.tokens.trained == record.tokens.generated > 0 for record in steps)


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_stopped_run_continues_as_if_it_had_not_been_stopped(make: Any, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = finished(make(tmp_path / "whole"))
    config = make(tmp_path / "parts")
    first, error = live(config, stop_after=2.5)
    assert isinstance(error, StopRequested)
    assert 0 < len(first.trainer.batches) < config.num_steps
    second = finished(config, resume=True)
    taken = len(first.trainer.batches) + len(second.trainer.batches)
    assert taken == config.num_steps
    assert second.trainer.weights == whole.trainer.weights
    evaluated = [one.step for life in (first, second) for one in life.recorder.held_out]
    assert evaluated == [one.step for one in whole.recorder.held_out]


def test_a_crash_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = finished(sft(tmp_path / "whole"))
    config = sft(tmp_path, checkpoint=CheckpointConfig(every=2))

    def fail_at_the_fourth(life: Life) -> None:
        take = life.trainer.train_step

        async def lost(*arguments: Any) -> Any:
            if life.trainer.version == 3:
                life.trainer.lose()
            return await take(*arguments)

        life.trainer.train_step = lost  # type: ignore[method-assign]

    _, error = live(config, prepare=fail_at_the_fourth)
    assert isinstance(error, TrainerLostError)
    second = finished(config, resume=True)
    assert [record.step for record in second.recorder.steps] == [3, 4, 5]
    assert second.trainer.weights == whole.trainer.weights


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    config = sft(tmp_path, trainer=TrainerConfig(max_episode_tokens=40))
    rows = [{"messages": conversation(n, "Ann " * (50 if n == 3 else 1))} for n in range(8)]
    write_rows(tmp_path / "train.jsonl", rows)
    life = finished(replace(config, num_steps=2))
    assert sum(len(batch.episode_lengths) for batch in life.trainer.batches) == 7
    dropped = [
        record.tokens.discarded.get("oversized_episode", 0) for record in life.recorder.steps
    ]
    assert sorted(dropped)[0] == 0
    assert sum(dropped) > 50


def test_a_run_of_which_no_row_fits_fails(tmp_path: Path) -> None:
    config = sft(tmp_path, trainer=TrainerConfig(max_episode_tokens=5))
    config = replace(config, task=replace(config.task, held_out=HeldOutConfig()))
    life, error = live(config)
    assert isinstance(error, NothingTrainedError)
    assert life.trainer.version == 0


def test_a_row_that_cannot_be_used_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    config = sft(tmp_path)
    rows = [{"messages": conversation(n)} for n in range(10)]
    rows[4] = {"messages": conversation(4)[:2]}
    write_rows(tmp_path / "train.jsonl", rows)
    life, error = live(config)
    assert isinstance(error, DataError)
    assert "train.jsonl, line 5" in str(error)
    assert (
        life.checkpoints.steps() == [life.recorder.steps[-1].step] if life.recorder.steps else [0]
    )


def test_reference_logprobs_are_those_of_the_initial_policy_and_computed_once(
    tmp_path: Path,
) -> None:
    life = finished(dpo(tmp_path))
    losses = life.trainer.losses
    assert all(isinstance(loss, PreferenceLoss) and loss.beta == 0.2 for loss in losses)
    kept = json.loads((tmp_path / "run" / REFERENCES).read_text())
    assert len(kept) == 13
    for batch, loss in zip(life.trainer.batches, losses, strict=True):
        assert isinstance(loss, PreferenceLoss)
        # What the simulated trainer answers before its first step.
        expected = -((batch.token_ids % 89) / 89) * batch.loss_mask
        sums = np.add.reduceat(expected, batch.episode_starts)
        np.testing.assert_allclose(loss.references, sums, atol=1e-5)
    computed = life.trainer.num_logprobs
    again = finished(replace(dpo(tmp_path), num_steps=7), resume=True)
    assert again.trainer.num_logprobs < computed  # only the evaluations


def test_a_resumed_run_computes_missing_references_before_it_loads_weights(tmp_path: Path) -> None:
    config = dpo(tmp_path)
    live(config, stop_after=2.5)
    before = (tmp_path / "run" / REFERENCES).read_bytes()
    (tmp_path / "run" / REFERENCES).unlink()
    finished(config, resume=True)
    assert (tmp_path / "run" / REFERENCES).read_bytes() == before
