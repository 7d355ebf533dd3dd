"""Sums, as an environment of verifiers; some tasks break on purpose."""

from __future__ import annotations

import os
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str
    fault: str = ""


class SumTask(vf.Task[SumData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "dies":
            os._exit(3)

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fault == "raises":
            raise ZeroDivisionError("no reward today")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def has_key(self, trace: vf.Trace) -> float:
        return float("SUMS_KEY" in os.environ)


class SumsConfig(vf.TasksetConfig):
    first: int = 0
    endless: bool = False


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def __init__(self, config: SumsConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Iterator[SumTask]:
        number = self.config.first
        while self.config.endless or number < self.config.first + 20:
            data = SumData(prompt=f"{number} + 1?", answer=str(number + 1))
            yield SumTask(data, self.config.task)
            number += 1
