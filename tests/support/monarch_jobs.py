"""Monarch jobs on this machine, for ``--launch.job``. As on other machines, their workers do not
inherit what a process of ours has set."""

from __future__ import annotations

from monarch.job import ProcessJob

apart = ProcessJob({"trainer": 1, "generators": 1}, env={"TORCHTITAN_RL_PYTHON": ""})
odd = ProcessJob({"trainer": 1, "data": 1})
number = 3
