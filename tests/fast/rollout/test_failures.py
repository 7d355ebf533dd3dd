from __future__ import annotations

from dataclasses import replace

from tests.fast.observability.test_metrics import make_group, make_rollout
from torchtitan_rl.rollout.failures import describe_failures, num_failed
from torchtitan_rl.types import RolloutStatus


def test_failures_are_told_by_their_most_frequent_cause() -> None:
    good, failed = make_rollout(1.0), make_rollout(None, status=RolloutStatus.ENV_ERROR)
    lost = make_rollout(None, status=RolloutStatus.GENERATION_ERROR)
    no_disk = replace(failed, cause="OSError: no\n  disk")
    long = replace(failed, cause="x" * 1000)
    assert describe_failures([make_group(good)]) == ""
    groups = [make_group(good, no_disk), make_group(no_disk, lost)]
    assert num_failed(groups) == 3
    assert describe_failures(groups) == (
        "3 of 4 rollouts failed: env_error: OSError: no disk (2x), and 1 other cause"
    )
    assert len(describe_failures([make_group(long)])) < 400
