"""Sides of a benchmark in processes of their own."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.workers import Side, Worker

CORE = min(os.sched_getaffinity(0))


def build(name: str) -> Side:
    if name == "broken":
        raise ValueError("no such side")

    def side(work: str, argument: Any) -> Any:
        return name, work, argument, os.environ["SIDE"], os.sched_getaffinity(0)

    return side


def worker(name: str) -> Worker:
    return Worker(build, name, cores=(CORE,), environment={"SIDE": name})


def test_sides_build_at_the_same_time_and_work_on_their_own_cores_on_request() -> None:
    with worker("one") as one, worker("other") as other:
        for side in (one, other):
            side.wait_until_built()
        answer, cpu_s = other.call("add", (1, 2))
        assert answer == ("other", "add", (1, 2), "other", {CORE})
        assert cpu_s >= 0
        assert one.call("add")[0] == ("one", "add", None, "one", {CORE})
