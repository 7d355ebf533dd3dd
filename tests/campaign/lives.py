"""One life of a run: a process that starts on what is on the disk and ends somehow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.campaign.disk import disk_of
from tests.campaign.loop import CampaignLoop
from tests.campaign.machine import Fault, Killed, Machine
from tests.campaign.plan import CampaignPlan
from tests.campaign.rows import Rows, write_identity
from tests.support.simulation import Simulation
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.checkpointing import (
    SavedRun,
    choose_checkpoint,
    read_saved_run,
    why_not_resumable,
)
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.orchestration.records import StepRecord
from torchtitan_rl.rollout.calls import abandoned
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of

LIMIT_S = 60_000.0  # of virtual time; a run that takes longer hangs
_QUIET_S = 300.0  # in which whatever is being ended ends


class Ending(StrEnum):
    SUCCESS = "success"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"  # with an error of the package
    KILLED = "killed"
    BROKEN = "broken"  # with any other error
    HUNG = "hung"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a life found on the disk. ``recorded``: tokens by group, of its checkpoint and journal;
    ``unreadable`` says why they could not be had."""

    step: int | None = None
    saved: SavedRun = field(default_factory=SavedRun)
    recorded: dict[str, int] = field(default_factory=dict)
    unreadable: str | None = None


@dataclass(kw_only=True)
class Life:
    """``root`` is where the next life goes on."""

    number: int
    plan: CampaignPlan
    machine: Machine
    start: Start
    root: Path
    ending: Ending = Ending.BROKEN
    error: BaseException | None = None
    simulation: Simulation | None = None
    leftovers: list[str] = field(default_factory=list)
    seconds: float = 0.0
    resumed_step: int | None = None
    timeline: list[StepRecord] = field(default_factory=list)  # of this life and those before it
    scalings: list[asyncio.Task[str]] = field(default_factory=list)
    excuse: str = ""  # what another process did, after which it may fail

    def describe(self) -> str:
        fired = "".join(f"\n      {one}" for one in self.machine.fired) or " none"
        because = f" ({type(self.error).__name__}: {self.error})" if self.error else ""
        return (
            f"  life {self.number}: from step {self.start.step or 0}, {self.ending}{because} after "
            f"{self.seconds:.2f} s and {self.machine.num_awaits} awaits; faults:{fired}"
        )


def live(
    number: int,
    plan: CampaignPlan,
    root: Path,
    faults: Sequence[Fault],
    *,
    before: Life | None = None,
) -> Life:
    """Run it to its end, whatever that is; it goes on where the life ``before`` ended."""
    life = born(number, plan, root, faults)
    machine = life.machine
    loop = CampaignLoop(machine)
    abandoned._running.clear()  # a new process has left no call behind
    with disk_of(machine):
        try:
            supervisor = supervise(life, loop, resume=before is not None)
            loop.run_until_complete(loop.create_task(supervisor, name="machine: supervisor"))
        except Killed:
            was_killed(life, loop)
        life.seconds = loop.time()
        machine.is_dead = True
    loop.discard()
    life.leftovers += loop.strays
    continue_timeline(life, before)
    return life


def born(number: int, plan: CampaignPlan, root: Path, faults: Sequence[Fault]) -> Life:
    start = look_at(root)
    write_identity(plan.config(root), root)
    return Life(number=number, plan=plan, machine=Machine(root, faults), start=start, root=root)


def was_killed(life: Life, loop: CampaignLoop) -> None:
    machine = life.machine
    life.ending = Ending.HUNG if machine.has_spun else Ending.KILLED
    assert machine.remains is not None
    life.root = machine.remains
    if machine.has_spun:
        life.leftovers = loop.waiting(machine)


def continue_timeline(life: Life, before: Life | None) -> None:
    if before is not None and life.simulation is None:  # it ended before it chose a checkpoint
        life.timeline = before.timeline
    elif before is not None and life.resumed_step is not None:
        life.timeline = [one for one in before.timeline if one.step <= life.resumed_step]
    if life.simulation is not None:
        life.timeline += life.simulation.recorder.steps


async def supervise(life: Life, loop: CampaignLoop, *, resume: bool) -> None:
    main = loop.create_task(_main(life, resume), name="main")
    life.machine.controls["cancel"] = lambda: _signal(life, main, cancel=True)
    life.machine.controls["stop"] = lambda: _signal(life, main, cancel=False)
    life.machine.controls["grow"] = lambda: _scale(life, 1)
    life.machine.controls["shrink"] = lambda: _scale(life, -2)
    life.machine.controls["lose_endpoint"] = lambda: None  # until it is there
    await asyncio.wait({main}, timeout=LIMIT_S)
    if not main.done():
        life.ending = Ending.HUNG
        life.leftovers = loop.waiting(life.machine)
        return
    _judge(life, main)
    simulation = life.simulation
    if simulation is None:
        return
    life.leftovers = _held(simulation)
    life.leftovers += [f"scale: {error!r}" for error in _errors_of(life.scalings)]
    life.machine.controls = dict.fromkeys(life.machine.controls, lambda: None)
    await simulation.router.close()
    await simulation.close_trainer()
    await asyncio.sleep(_QUIET_S)
    life.leftovers += loop.waiting(life.machine)


def _signal(life: Life, main: asyncio.Task[None], *, cancel: bool) -> None:
    if cancel or life.simulation is None:
        main.cancel()
    if life.simulation is not None:
        life.simulation.controller.request_stop()


def _scale(life: Life, change: int) -> None:
    """Add or remove replicas, as the command of another process does."""
    simulation = life.simulation
    if simulation is not None and simulation.restarts is not None:
        number = max(len(simulation.reserved) + 1, len(simulation.router.versions()) + change)
        life.scalings.append(asyncio.create_task(simulation.scale(number), name="scale"))


def _errors_of(scalings: Sequence[asyncio.Task[str]]) -> list[BaseException]:
    """The errors that no user may see: all but that the run is ending or has no room."""
    ended = [one for one in scalings if one.done() and not one.cancelled()]
    return [
        error
        for one in ended
        if (error := one.exception()) is not None and not isinstance(error, TorchtitanRLError)
    ]


async def _main(life: Life, resume: bool) -> None:
    """As `torchtitan_rl.commands.train` does it."""
    plan, root = life.plan, life.machine.root
    checkpoints = CheckpointDirectory(root / "checkpoints")
    found = choose_checkpoint(checkpoints, Journal(root / JOURNAL)) if resume else None
    life.resumed_step = found.step if found else None
    rows = Rows(plan.config(root), resume_step=life.resumed_step)
    simulation = life.simulation = plan.simulation(root, life.machine, rows)
    try:
        async with AsyncExitStack() as stack:
            for one in simulation.alongside():
                await stack.enter_async_context(one)
            await simulation.train(resume_from=found)
            await (simulation.restarted or simulation.trainer).export_hf(root)
    finally:
        rows.close()


def _judge(life: Life, main: asyncio.Task[None]) -> None:
    if main.cancelled():
        life.ending = Ending.CANCELLED
        return
    life.error = main.exception()
    match life.error:
        case None:
            life.ending = Ending.SUCCESS
        case StopRequested():
            life.ending = Ending.STOPPED
        case TorchtitanRLError():
            life.ending = Ending.FAILED
        case _:
            life.ending = Ending.BROKEN


def _held(simulation: Simulation) -> list[str]:
    """What a run that is over still holds on to."""
    held = [
        f"{state.name} is pinned" for state in simulation.router._pool.all if state.is_pinned
    ] + [
        f"{state.name} has a load of {state.outstanding_requests} requests"
        for state in simulation.router._pool.all
        if state.outstanding_requests or state.outstanding_tokens
    ]
    held += [f"waits: {wait.name}" for wait in simulation.controller._state.waits.open()]
    held += [f"active: {one.rollout_id}" for one in simulation.rollouter.activities()]
    return held


def look_at(root: Path) -> Start:
    """What is on a disk, without changing it."""
    directory, journal = CheckpointDirectory(root / "checkpoints"), Journal(root / JOURNAL)
    # Where a kill came between the two renames of a second checkpoint, the first one is taken.
    paths = {
        step_of(path.with_suffix("")): path
        for path in directory.root.glob("step-*.replaced")
        if not path.with_suffix("").exists()
    } | {step: directory.path(step) for step in directory.steps()}
    complete = sorted(paths)
    steps = [s for s in complete if _is_resumable(paths[s], journal)]
    step = (steps or complete or [None])[-1]
    saved = SavedRun()
    try:
        if step is not None:
            saved = read_saved_run(paths[step])
        rollouts = journal.restore(step or 0, saved.rollouts, mark=saved.position.journal_mark)
    except (TorchtitanRLError, ValueError, KeyError) as error:
        return Start(step=step, saved=saved, unreadable=repr(error))
    recorded: dict[str, int] = {}
    for name, rollout in rollouts.items():
        group_id = name.rpartition("/")[0]
        recorded[group_id] = recorded.get(group_id, 0) + rollout.num_tokens
    return Start(step=step, saved=saved, recorded=recorded)


def _is_resumable(path: Path, journal: Journal) -> bool:
    return path.suffix == ".replaced" or why_not_resumable(path, journal) is None
