"""A run on the hosts of a Monarch job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.hosts.test_two_hosts import PATIENT
from tests.real.runs import ONE_REPLICA, Run, options, require_audit

pytestmark = pytest.mark.soak


def test_the_meshes_of_a_job_place_the_parts_and_nothing_is_left_of_a_job_of_one_run(
    tmp_path: Path,
) -> None:
    more = ("--num-steps", "1", *ONE_REPLICA, "--metrics.rollouts-per-step", "1000")
    words = options(tmp_path, "run", *more, "--launch.allow-plain-tcp")
    words += ["--launch.job", "tests.support.monarch_jobs.apart"]
    run = Run(words, log=tmp_path / "log", environment=PATIENT)
    run.require_success()
    require_audit(tmp_path / "run")
    assert "host0: trainer; host1: 1 replica" in run.log.read_text()
