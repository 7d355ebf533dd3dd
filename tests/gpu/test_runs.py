"""Whole commands on the installed device. On a CPU, `tests/real` runs more of this."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.real.runs import ROOT, TINY, Run, read_metrics, require_audit
from tests.real.served import serve
from torchtitan_rl.backends.vllm.cpu import installed_device

IS_CUDA = installed_device() == "cuda"
POLICY = ROOT / "experiments" / "alphabet_sort" / "policy"
NUM_STEPS = 12

pytestmark = [pytest.mark.timeout(1800.0)] + ([] if IS_CUDA else [pytest.mark.soak])


def test_serve_answers_sampled_requests_without_logprobs(tmp_path: Path) -> None:
    """Neither seeded nor greedy, and with top_p and top_k: vLLM has samplers for just these that
    compile themselves inside a step."""
    served = serve(tmp_path, POLICY, "--generator.replicas", "1")
    try:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        for top_k in (20, 50):
            answer = client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Sort: b a"}],
                max_tokens=20,
                top_p=0.9,
                extra_body={"top_k": top_k},
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
    finally:
        served.run.kill_all()


def test_the_demo_trains_on_one_device(tmp_path: Path) -> None:
    options = (
        *(str(TINY), "--output-dir", str(tmp_path), "--name", "run"),
        *("--placement", "colocated", "--generator.replicas", "1"),
        *("--num-steps", str(NUM_STEPS), "--evaluation.every", "0"),
        *("--evaluation.num-problems", "16", "--metrics.progress", "plain"),
    )
    run = Run(options, log=tmp_path / "log")
    run.require_success()
    require_audit(tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if "train/reward_mean" in row]
    assert len(rows) == NUM_STEPS
    assert rows[-1]["train/reward_mean"] > 0.2  # the policy begins at 0.3
    largest = 0.1 if IS_CUDA else 2e-6  # expected differences: docs/training.md
    assert all(row["trainer/age_0/logprob_diff_mean"] < largest for row in rows)
