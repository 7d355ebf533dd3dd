"""Rules of the timeline of a whole run, as its rows tell it over all lives: every step once, every
group once, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.campaign.lives import Ending, Life
from tests.campaign.rows import damaged_rows, read_rows
from tests.support.simulated_parts import SimDataset
from torchtitan_rl.training.checkpoints import CheckpointDirectory


def keeps_its_rows_readable(life: Life) -> Iterator[str]:
    damaged = damaged_rows(life.root)
    if damaged:
        yield f"{len(damaged)} damaged lines before the last: {damaged[0][:80]!r}"


def _rows_are_whole(life: Life) -> bool:
    """Else other rules would only say it again."""
    steps = [row["step"] for row in read_rows(life.root)]
    return steps == list(range(1, life.plan.num_steps + 1))


def writes_every_row_once(life: Life) -> Iterator[str]:
    """Up to the newest checkpoint, or to the end where the run ended cleanly."""
    rows = [row["step"] for row in read_rows(life.root)]
    steps = CheckpointDirectory(life.root / "checkpoints").steps()
    least = steps[-1] if steps else 0
    if rows != list(range(1, len(rows) + 1)) or len(rows) < least:
        yield f"rows {rows}, newest checkpoint {least}"


def finishes_its_work(life: Life) -> Iterator[str]:
    """A run that succeeded has taken all its steps, each once."""
    simulation, plan = life.simulation, life.plan
    if life.ending is not Ending.SUCCESS or simulation is None:
        return
    if simulation.controller.step != plan.num_steps:
        yield f"{simulation.controller.step} steps of {plan.num_steps}"
    num_updates = sum(row["trained"] > 0 for row in read_rows(life.root))
    if _rows_are_whole(life) and simulation.trainer.version != num_updates:
        yield f"{simulation.trainer.version} optimizer steps, {num_updates} rows with tokens"


def trains_each_group_once(life: Life) -> Iterator[str]:
    """Over the whole timeline: no group twice, no problem skipped."""
    if life.ending is not Ending.SUCCESS or life.simulation is None:
        return
    if not _rows_are_whole(life):
        return
    trained = [name for row in read_rows(life.root) for name in row["groups"]]
    twice = [name for name, number in Counter(trained).items() if number > 1]
    if twice:
        yield f"trained twice: {twice}"
    dataset, position = SimDataset(life.plan.problems), life.simulation.dataset.state_dict()
    for _ in range(position["position"]):
        dataset.next()
    strange = sorted(set(trained) - set(dataset.drawn))
    if strange:
        yield f"not drawn: {strange}"
    discarded = life.simulation.ledger.groups_discarded
    gone = discarded.total() - discarded["resampled"]
    missing = [name for name in dataset.drawn if name not in set(trained)]
    if len(missing) != gone + len(life.simulation.controller._state.buffer):
        yield f"{missing} were drawn and not trained; {dict(discarded)} discarded"


def keeps_the_order(life: Life) -> Iterator[str]:
    """Synchronous training takes the problems as the dataset gives them."""
    plan = life.plan
    if life.ending is not Ending.SUCCESS or not plan.is_determined:
        return
    if not _rows_are_whole(life):
        return
    trained = [name for row in read_rows(life.root) for name in row["groups"]]
    dataset = SimDataset(plan.problems)
    while len(dataset.drawn) < 200:
        dataset.next()
    order = [dataset.drawn.index(name) for name in trained if name in dataset.drawn]
    is_whole = plan.zero_variance != "train" or order == list(range(len(order)))
    if order != sorted(order) or not is_whole:
        yield f"{trained}"
