"""The main job from the command line: real vLLM, torchtitan and Monarch processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.real.runs import Run, options, read_metrics, require_audit


def weights(run_dir: Path):
    return load_file(run_dir / "policy" / "model.safetensors")


def checkpoint_files(run_dir: Path) -> dict[str, bytes]:
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(root) -> Path:
    """An uninterrupted run of three steps."""
    run = Run(options(root, "whole", "--num-steps", "3"), log=root / "whole.log")
    assert run.wait() == 0, run.log.read_text()[-3000:]
    assert run.left_behind() == []
    require_audit(root / "whole")
    return root / "whole"


def test_a_run_trains_validates_and_accounts_for_every_token(whole):
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "evaluation/reward_mean" in rows[0]
    assert "evaluation/reward_mean" in rows[3]
    for row in rows[1:]:
        assert row["policy/version"] == row["step"]
        assert row["policy/staleness_max"] == 0
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
        assert row["tokens/trained"] == row["trainer/trained_tokens"] > 0
        # Version n reaches the replicas while step n + 1 is taken, and is in that step's row.
        assert row.get("sync/lost_replicas") == (None if row["step"] == 1 else 0)
    assert rows[-1]["account/unaccounted_tokens"] == 0


def test_trap_25_trainer_and_generator_agree_on_the_logprobs_of_every_step(whole):
    """Up to float32 rounding: see test_episode_tokens for the bounds."""
    rows = read_metrics(whole)[1:]
    assert rows[0]["trainer/logprob_diff_max"] < 1e-5
    assert all(row["trainer/logprob_diff_max"] < 3e-5 for row in rows)
    assert all(row["trainer/logprob_diff_mean"] < 2e-6 for row in rows)


def test_outputs_are_where_the_readme_says(whole):
    rollouts = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts
    trace = json.loads((whole / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert len({event["pid"] for event in events}) >= 4  # controller, trainer, two replicas
    assert any((whole / "tensorboard").iterdir())
    assert (whole / "checkpoints" / "step-000003").is_dir()
    assert "lm_head.weight" in weights(whole) or "model.embed_tokens.weight" in weights(whole)


def test_a_terminated_run_leaves_no_process_and_resumes_to_the_same_weights(root, whole):
    run = Run(options(root, "stopped", "--num-steps", "3"), log=root / "stopped.log")
    run.wait_until(lambda: len(read_metrics(root / "stopped")) >= 2, "the first step")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.log.read_text()[-3000:]
    assert run.left_behind() == []
    require_audit(root / "stopped")

    resumed = Run(
        options(root, "stopped", "--num-steps", "3", "--checkpoint.resume"),
        log=root / "resumed.log",
    )
    assert resumed.wait() == 0, resumed.log.read_text()[-3000:]
    assert "resumed after step" in resumed.log.read_text()
    require_audit(root / "stopped")
    expected, actual = weights(whole), weights(root / "stopped")
    assert expected.keys() == actual.keys()
    assert all(expected[name].equal(actual[name]) for name in expected)
    same = ("step", "train/reward_mean", "trainer/loss", "tokens/generated")
    for one, other in zip(read_metrics(whole), read_metrics(root / "stopped"), strict=True):
        assert [one.get(name) for name in same] == [other.get(name) for name in same]


def test_trap_29_a_diverging_run_ends_with_1_and_keeps_its_last_good_checkpoint(root, whole):
    """It goes on after step 3 with a learning rate that makes step 4's weights useless."""
    shutil.copytree(whole, root / "diverged")
    run = Run(
        options(
            root,
            "diverged",
            *("--num-steps", "9", "--checkpoint.resume"),
            *("--trainer.optimizer.learning-rate", "1e18"),
        ),
        log=root / "diverged.log",
    )
    assert run.wait() == 1, run.log.read_text()[-3000:]
    assert run.left_behind() == []
    assert re.search(r"^error: DivergedError: .*(loss|grad_norm)", run.log.read_text(), re.M)
    assert checkpoint_files(root / "diverged") == checkpoint_files(whole)


def test_a_killed_controller_leaves_no_process(root):
    run = Run(options(root, "killed", "--num-steps", "50"), log=root / "killed.log")
    run.wait_until(lambda: len(read_metrics(root / "killed")) >= 1, "the first evaluation")
    run.process.kill()
    run.wait()
    assert run.left_behind() == []


def test_tensor_parallel_replicas_and_a_sharded_trainer_run_from_torchrun_over_rdma(root):
    run = Run(
        options(
            root,
            "parallel",
            *("--num-steps", "2"),
            *("--generator.replicas", "1"),
            *("--generator.tensor-parallel", "2"),
            *("--trainer.data-parallel-shard", "2"),
            *("--trainer.threads", "1"),
            *("--weight-sync.transport", "rdma"),
            *("--weight-sync.mode", "drain"),
        ),
        log=root / "parallel.log",
        module="torchrun",
    )
    assert run.wait() == 0, run.log.read_text()[-3000:]
    assert run.left_behind() == []
    rows = read_metrics(root / "parallel")
    assert [row["policy/version"] for row in rows] == [0, 1, 2]
    assert all(row["trainer/logprob_diff_max"] < 3e-5 for row in rows[1:])


def test_trap_28_a_run_that_was_killed_resumes_to_the_same_weights(root, whole):
    run = Run(options(root, "killed-step", "--num-steps", "3"), log=root / "killed-step.log")
    run.wait_until(lambda: len(read_metrics(root / "killed-step")) >= 2, "the first step")
    run.kill_all()
    run.wait()
    again = ("--num-steps", "3", "--checkpoint.resume")
    resumed = Run(options(root, "killed-step", *again), log=root / "killed-step-resumed.log")
    assert resumed.wait() == 0, resumed.log.read_text()[-3000:]
    assert [row["step"] for row in read_metrics(root / "killed-step")] == [0, 1, 2, 3]
    require_audit(root / "killed-step")
    for name, tensor in weights(whole).items():
        assert tensor.equal(weights(root / "killed-step")[name])
