"""The Monarch job of ``launch.job``: its hosts, from ``monarch apply`` or for one run. A job that
``monarch apply`` started in this folder is used, as Monarch's own ``job.state()`` does, and stays.
A job that is not applied yet is applied for this run, and killed at its end."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from monarch.actor import HostMesh
from monarch.job import DEFAULT_JOB_PATH, JobTrait, job_load

from torchtitan_rl.errors import ConfigError, one_line


@contextmanager
def applied_job(name: str) -> Iterator[Mapping[str, HostMesh]]:
    """The host meshes of a job by their names. ``name`` is ``MODULE.ATTR``; the module may be in
    the working folder, too. Raises ConfigError: there is no such job, or it has no hosts."""
    field = f"launch.job is {name!r}"
    job = _load(name, field)
    path = Path(DEFAULT_JOB_PATH)
    if path.exists() and path.stat().st_uid != os.geteuid():
        raise ConfigError(f"{field}: {path} is another user's, and could run any program as you")
    found = None
    try:
        try:
            applied = job_load(str(path)) if path.exists() else job
            found = applied.apply_id
            is_other = applied.active and applied.can_run(applied) and not applied.can_run(job)
            state = None if is_other else job.state(str(path) if applied.active else None)
        except Exception as error:  # of a scheduler
            raise ConfigError(f"{field}: it has no hosts ({one_line(error)})") from error
        if state is None:  # Monarch would end it, and with it a run
            raise ConfigError(
                f"{field}: `monarch apply` has started another job in this folder; end that by "
                "`monarch kill`, or start in another folder"
            )
        yield dict(state._hosts)  # no public name has all of them
    finally:
        if job.active and job.apply_id != found:
            job.kill()


def _load(name: str, field: str) -> JobTrait:
    place, _, attribute = name.rpartition(".")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        found = vars(importlib.import_module(place))
    except (Exception, SystemExit) as error:
        cause = one_line(error)
        raise ConfigError(f"{field}: {place} cannot be imported ({cause})") from error
    jobs = {name: value for name, value in found.items() if isinstance(value, JobTrait)}
    if attribute not in jobs:
        raise ConfigError(
            f"{field}: {place} has no job {attribute!r} (an object of a class in monarch.job, "
            f"such as SlurmJob); it has {', '.join(jobs) or 'none'}"
        )
    return jobs[attribute]
