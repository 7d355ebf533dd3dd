"""What benchmarks leave behind, and the figures of whole runs."""

from __future__ import annotations

import argparse
import json
import platform

import pytest

from benchmarks.async_training import CONFIG as TINY
from benchmarks.async_training import arms, lost_seconds
from benchmarks.end_to_end import column, figures, train_words
from benchmarks.report import machine, print_table, write_report
from benchmarks.training_runs import FinishedRun
from torchtitan_rl.config.loader import load_config


def test_a_report_says_on_what_it_was_measured(tmp_path):
    path = tmp_path / "of" / "today.json"
    write_report(path, {"machine": machine(), "ratios": {"ours / theirs": 1.5}})
    report = json.loads(path.read_text())
    facts = report["machine"]
    assert facts["python"] == platform.python_version()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert facts["packages"]["torch"]
    assert facts["processor"]
    assert report["ratios"] == {"ours / theirs": 1.5}


def test_columns_of_a_table_are_as_wide_as_their_widest_cell(capsys):
    print_table(["side", "s"], [["a", "10.25"], ["longer", "3"]])
    assert capsys.readouterr().out == "side        s\na       10.25\nlonger      3\n"


def test_seconds_are_medians_and_tokens_a_second_are_of_all_steps():
    repeats = [
        {
            "time/step_s": [2.0, 4.0],
            "time/rollout_s": [1.0, 1.0],
            "time/train_s": [0.5, 0.5],
            "time/sync_s": [0.0, 0.5],
            "tokens/generated": [100.0, 300.0],
        },
        {
            "time/step_s": [3.0],
            "time/rollout_s": [2.0],
            "time/train_s": [1.0],
            "time/sync_s": [0.25],
            "tokens/generated": [50.0],
        },
    ]
    assert figures(repeats) == {
        "steps": 3,
        "step_s": 3.0,
        "step_s_mean": 3.0,
        "rollout_s": 1.0,
        "train_s": 0.5,
        "sync_s": 0.25,
        "generated_tokens": 450.0,
        "generated_tokens_per_s": 50.0,
    }


def test_a_run_is_read_from_its_second_step_on():
    row = {"train/reward_mean": 0.0}
    run = FinishedRun(
        rows=(
            row | {"step": 1, "time/step_s": 9.0},
            {"step": 2, "evaluation/reward_mean": 0.0, "time/step_s": 8.0},
            row | {"step": 2, "time/step_s": 2.0},
            row | {"step": 3, "time/step_s": 3.0},
        ),
        seconds=20.0,
    )
    assert column(run, "time/step_s") == [2.0, 3.0]
    with pytest.raises(SystemExit, match="more --steps"):
        column(run, "time/train_s")


def test_the_command_line_sets_the_whole_run_and_further_options_win():
    options = argparse.Namespace(
        model="a/model",
        groups=4,
        group_size=2,
        max_tokens=7,
        max_length=96,
        steps=3,
        options="--schedule.staleness 1 --evaluation.num-problems 5",
    )
    config = load_config(TINY, train_words(options))
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (4, 2)
    assert config.rollout.sampling.max_tokens_per_turn == 7
    assert config.rollout.max_total_tokens == 96
    assert config.generator.max_model_len == config.trainer.row_len == 96
    assert config.policy.checkpoint == "a/model"
    assert (config.num_steps, config.trainer.optimizer.decay_steps) == (3, 0)
    assert (config.schedule.staleness, config.evaluation.num_problems) == (1, 5)


def test_the_arms_of_the_asynchronous_benchmark_share_two_cores():
    configs = {arm.name: load_config(TINY, arm.options) for arm in arms()}
    assert list(configs) == [
        "both S=0", "both S=1", "split S=0", "split S=1", "split S=2", "split S=4",
    ]  # fmt: skip
    for name, config in configs.items():
        assert name.endswith(f"S={config.schedule.staleness}")
        is_split = name.startswith("split")
        share = 1 if is_split else 2
        assert (config.generator.replicas, config.trainer.threads) == (share, share)
        assert config.pin_cores is is_split


def test_the_time_beyond_the_ideal_is_waiting_or_slower_work():
    """A step takes 2.0 s instead of 1.5 s; the trainer waits for 0.2 s, the replica longer."""
    row = {
        "train/reward_mean": 0.5,
        "time/step_s": 2.0,
        "overlap/trainer_idle_share": 0.1,
        "overlap/generator_idle_share": 0.4,
    }
    run = FinishedRun(rows=tuple(row | {"step": step} for step in range(1, 12)), seconds=30.0)
    assert lost_seconds([run], ideal_s=1.5) == pytest.approx(
        {"waiting_s": 0.2, "slower_work_s": 0.3}
    )
