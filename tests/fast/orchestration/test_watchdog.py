import asyncio

import pytest

from tests.support.rollouts import PROBLEM, CountingEnv, Factory, make_rollouter
from torchtitan_rl.errors import DeadlineError
from torchtitan_rl.orchestration.watchdog import (
    WaitRegistry,
    Watchdog,
)
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.run import Phase, RolloutActivity
from torchtitan_rl.types import Completion


class Run:
    """A run that only waits, on a clock that moves when told."""

    def __init__(self, *, report_wait_s: float = 60, max_wait_s: float = 300) -> None:
        self.now = 1000.0
        self.progress = 0
        self.activities: list[RolloutActivity] = []
        self.said: list[str] = []
        self.waits = WaitRegistry(clock=lambda: self.now)
        self.watchdog = Watchdog(
            self.waits,
            num_changes=lambda: self.progress,
            report_wait_s=report_wait_s,
            max_wait_s=max_wait_s,
            activities=lambda: self.activities,
            say=self.said.append,
            notes=lambda: ["replica0 serving, 2 requests"],
        )
        self.watchdog.poll()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.watchdog.tick_s)
            self.watchdog.poll()


def activity(rollout_id: str, *, since_s: float, turn: int = 2) -> RolloutActivity:
    return RolloutActivity(
        rollout_id=rollout_id, turn=turn, phase=Phase.ENVIRONMENT, detail="step", since_s=since_s
    )


def test_a_quiet_period_is_reported_with_the_chain_of_waits() -> None:
    run = Run()
    run.activities = [activity("e0/p9/r0", since_s=1030), activity("e0/p12/r3", since_s=1002)]
    run.watchdog.poll()
    with run.waits.track(
        "trainer waits for a full batch", details=lambda: "3 of 16 groups finished"
    ):
        run.pass_time(20)
        with run.waits.track("dataset waits for room in the buffer"):
            run.pass_time(40)
    assert run.said == [
        "nothing has moved for 60 s:\n"
        "  trainer waits for a full batch (60 s): 3 of 16 groups finished\n"
        "  dataset waits for room in the buffer (40 s)\n"
        "  2 rollouts run (2 in environment); longest: e0/p12/r3, turn 2, environment step for "
        "58 s\n"
        "  replica0 serving, 2 requests"
    ]


def test_a_rollout_that_begins_something_new_is_progress() -> None:
    run = Run()
    run.activities = [activity("e0/p9/r0", since_s=0), activity("e0/p12/r3", since_s=900)]
    run.pass_time(50)
    run.activities[0] = activity("e0/p9/r0", since_s=run.now)
    run.pass_time(50)
    assert run.said == []


def test_at_the_deadline_the_run_ends_with_the_chain() -> None:
    run = Run()
    with (
        run.waits.track("trainer waits for a full batch"),
        pytest.raises(DeadlineError, match=r"(?s)moved for 300 s:.*full batch \(300 s\)"),
    ):
        run.pass_time(301)


def test_a_wait_with_a_limit_of_its_own_may_take_as_long_as_that_and_no_longer() -> None:
    run = Run()
    with run.waits.track("trainer waits for its optimizer step", limit_s=1000):
        run.pass_time(1000)
        with pytest.raises(DeadlineError, match=r"optimizer step \(1005 s\), over its limit"):
            run.pass_time(5)


def test_time_in_which_the_process_was_stopped_is_not_quiet() -> None:
    run = Run()
    run.now += 100_000
    run.watchdog.poll()
    assert run.said == []


def test_at_the_deadline_the_loops_end_and_a_hanging_environment_is_named() -> None:
    said: list[str] = []

    class HangingEnv(CountingEnv):
        async def step(self, completion: Completion) -> Observation | Terminal:
            if self.calls.count("step") == 1:
                await asyncio.Event().wait()
            return await super().step(completion)

    async def run() -> None:
        waits, finished = WaitRegistry(), asyncio.Event()
        rollouter = make_rollouter(Factory(HangingEnv))
        watchdog = Watchdog(
            waits,
            num_changes=lambda: 0,
            report_wait_s=0.01,
            max_wait_s=0.05,
            activities=rollouter.activities,
            say=said.append,
        )
        async with asyncio.TaskGroup() as loops:
            loops.create_task(watchdog.run())
            loops.create_task(rollouter.run_group("e0/p12", PROBLEM, size=2, seed=7))
            with waits.track("trainer waits for a full batch", details=lambda: "0 of 1 finished"):
                await finished.wait()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlineError)
    assert "trainer waits for a full batch" in said[0]
    chain = str(error)
    assert "trainer waits for a full batch (0 s): 0 of 1 finished" in chain
    assert (
        "2 rollouts run (2 in environment); longest: e0/p12/r0, turn 2, environment step" in chain
    )
