from __future__ import annotations

from dataclasses import replace

from tests.fast.observability.test_metrics import make_group, make_rollout
from torchtitan_rl.rollout.failures import all_failed_alike, describe_failures, num_failed
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


def test_causes_that_differ_in_ids_addresses_and_numbers_are_one_cause() -> None:
    failed = make_rollout(None, status=RolloutStatus.GENERATION_ERROR)
    refused = "'e0/p 1/r3/t2' refused: ConnectionError at 127.0.0.1:4711, <object at 0x7f21>, {} s"
    alike = [
        replace(failed, rollout_id=f"e0/p {n}/r{n}", cause=f"request 'e0/p {n}/r{n}/t2': {text}")
        for n, text in enumerate([refused.format(1.5), refused.format("2")])
    ]
    other = replace(failed, cause="request 'e0/p 1/r3/t2': no disk")
    text = describe_failures([make_group(*alike)])
    assert text.endswith("(2x)")
    assert "at 127.0.0.1:4711" in text  # one of them as it is
    assert all_failed_alike([make_group(alike[0]), make_group(alike[1])])
    assert not all_failed_alike([make_group(*alike, other)])
    assert not all_failed_alike([make_group(*alike, make_rollout(1.0))])
