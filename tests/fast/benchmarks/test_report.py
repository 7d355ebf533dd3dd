"""What benchmarks leave behind, and the figures of whole runs."""

from __future__ import annotations

import argparse
import json
import platform

from benchmarks.async_training import CONFIG as TINY
from benchmarks.async_training import arms
from benchmarks.end_to_end import train_words
from benchmarks.report import machine, write_report
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
