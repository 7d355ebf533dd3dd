"""What a host that is attached must have in common with the controller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tests.support.far_hosts import Endpoint
from torchtitan_rl.backends.monarch.host_agent import describe_host
from torchtitan_rl.backends.monarch.hosts import answer_errors, leave, refusal
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError, HostsBusyError

ADDRESS = "tcp://10.0.0.2:26600"


def test_a_host_like_this_one_can_be_used_whatever_its_paths_are(tmp_path: Path) -> None:
    here = describe_host("local", TINY.policy.checkpoint)
    assert here.facts.num_cores > 0
    assert (here.policy != "", here.policy_error) == (True, "")
    there = replace(here, policy_dir=tmp_path)
    assert answer_errors(ADDRESS, here, there) == []


def test_each_difference_is_an_error_with_both_values(tmp_path: Path) -> None:
    here = describe_host("local", TINY.policy.checkpoint)
    old = replace(here, installed=here.installed | {"torch": "1.0"}, policy="0" * 64)
    versions, policy = answer_errors(ADDRESS, here, old)
    assert versions.startswith(f"launch.attach: {ADDRESS} has torch 1.0, and the controller has ")
    assert policy.startswith(f"launch.attach: {ADDRESS} has another model in ")
    assert here.policy[:12] in policy
    missing = describe_host(ADDRESS, str(tmp_path / "missing"))
    (error,) = answer_errors(ADDRESS, here, missing)
    assert error.startswith(f"launch.attach: on {ADDRESS}, policy.checkpoint is ")
    assert "there is no such directory" in error


def test_hosts_are_only_busy_where_nothing_else_is_wrong() -> None:
    here = describe_host("local", TINY.policy.checkpoint)
    busy = replace(here, is_busy=True)
    old = replace(here, installed=here.installed | {"torch": "1.0"})
    assert refusal(here, {"a": here, "b": here}) is None
    assert type(refusal(here, {"a": here, "b": busy})) is HostsBusyError
    mixed = refusal(here, {"a": old, "b": busy})
    assert type(mixed) is ConfigError
    assert len(mixed.errors) == 2


def test_a_host_of_a_job_that_does_not_answer_is_left() -> None:
    async def fail() -> bool:
        raise RuntimeError("error creating proc")

    leave({"trainer[0]": SimpleNamespace(end_run=Endpoint(fail))})
