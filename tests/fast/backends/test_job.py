"""The job of ``launch.job``, before it has hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.other_user import USER_ID, needs_root
from torchtitan_rl.backends.monarch.job import applied_job
from torchtitan_rl.errors import ConfigError

JOBS = "tests.support.monarch_jobs"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such.job", "no_such cannot be imported (ModuleNotFoundError: No module named"),
        (
            f"{JOBS}.far",
            f"{JOBS} has no job 'far' (an object of a class in monarch.job, such as SlurmJob); ",
        ),
        (f"{JOBS}.number", "it has apart, odd, one, other"),
    ],
)
def test_what_is_not_a_job_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused, applied_job(name):
        pass
    assert str(refused.value).startswith(f"launch.job is '{name}': ")
    assert message in str(refused.value)


@needs_root
def test_a_job_that_another_user_has_saved_here_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = Path(".monarch/job_state.pkl")
    saved.parent.mkdir()
    saved.write_bytes(b"cos\nsystem\n(S'touch attacked'\ntR.")  # a pickle that runs a program
    os.chown(saved, USER_ID, USER_ID)
    with pytest.raises(ConfigError, match="is another user's"), applied_job(f"{JOBS}.apart"):
        pass
    assert not Path("attacked").exists()


def test_a_job_is_killed_after_the_run_that_applied_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import monarch_jobs  # loads Monarch, which this module must not do first

    monkeypatch.chdir(tmp_path)
    job = monarch_jobs.Hostless("new")
    monkeypatch.setattr(monarch_jobs, "one", job)
    with applied_job(f"{JOBS}.one"):
        assert (job.active, job.num_kills) == (True, 0)
    assert job.num_kills == 1


def test_a_job_that_was_applied_before_stays_and_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import monarch_jobs

    monkeypatch.chdir(tmp_path)
    before = monarch_jobs.Hostless("one")
    before.apply()
    before.dump(".monarch/job_state.pkl")
    monkeypatch.setattr(monarch_jobs, "one", job := monarch_jobs.Hostless("one"))
    with applied_job(f"{JOBS}.one"):
        assert job.apply_id == before.apply_id
    assert job.active
    with pytest.raises(ConfigError, match="another job"), applied_job(f"{JOBS}.other"):
        pass
