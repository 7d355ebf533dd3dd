"""Monarch jobs on this machine, for ``--launch.job``. As on other machines, their workers do not
inherit what a process of ours has set."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.job import JobState, JobTrait, ProcessJob

apart = ProcessJob({"trainer": 1, "generators": 1}, env={"TORCHTITAN_RL_PYTHON": ""})
odd = ProcessJob({"trainer": 1, "data": 1})
number = 3


@dataclass
class Hostless(JobTrait):
    """A job of one's own that needs no process."""

    name: str
    num_kills: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, Hostless) and spec.name == self.name

    def _create(self, client_script: str | None) -> None:
        pass

    def _state(self) -> JobState:
        return JobState({})

    def _kill(self) -> None:
        self.num_kills += 1


one, other = Hostless("one"), Hostless("other")
