"""Rules of the timeline of a whole run over all lives: every group once, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.campaign.lives import Ending, Life
from tests.support.simulated_parts import SimDataset


def finishes_its_work(life: Life) -> Iterator[str]:
    """A run that succeeded has taken all its steps, each once."""
    simulation, plan = life.simulation, life.plan
    if life.ending is not Ending.SUCCESS or simulation is None:
        return
    steps = [record.step for record in life.timeline]
    if steps != list(range(1, plan.num_steps + 1)) or simulation.controller.step != plan.num_steps:
        yield f"{simulation.controller.step} steps of {plan.num_steps}, records of {steps}"
    num_updates = sum(record.tokens.trained > 0 for record in life.timeline)
    if simulation.trainer.version != num_updates:
        yield f"{simulation.trainer.version} optimizer steps, {num_updates} records with tokens"


def trains_each_group_once(life: Life) -> Iterator[str]:
    """Over the whole timeline: no group twice, no problem skipped."""
    if life.ending is not Ending.SUCCESS or life.simulation is None:
        return
    trained = _trained(life)
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
    trained = _trained(life)
    dataset = SimDataset(plan.problems)
    while len(dataset.drawn) < 200:
        dataset.next()
    order = [dataset.drawn.index(name) for name in trained if name in dataset.drawn]
    is_whole = plan.zero_variance != "train" or order == list(range(len(order)))
    if order != sorted(order) or not is_whole:
        yield f"{trained}"


def _trained(life: Life) -> list[str]:
    return [group.group_id for record in life.timeline for group in record.groups]
