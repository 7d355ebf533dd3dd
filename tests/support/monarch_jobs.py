"""Monarch jobs on this machine, for ``--launch.job``."""

from __future__ import annotations

from monarch.job import ProcessJob

apart = ProcessJob({"trainer": 1, "generators": 1})
odd = ProcessJob({"trainer": 1, "data": 1})
number = 3
