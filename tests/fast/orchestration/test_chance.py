"""Simulated runs by chance: whatever fails, and whenever, the bound holds and the run ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.orchestration.ledger import require_sums

PLANS = st.builds(
    Plan,
    num_steps=st.integers(1, 5),
    groups_per_step=st.integers(1, 4),
    group_size=st.integers(2, 3),
    staleness=st.integers(0, 3),
    window=st.sampled_from([0.0, 0.25, 0.5]),
    during_step=st.sampled_from(["running", "aborted", "asleep"]),
    zero_variance=st.sampled_from(["train", "skip", "resample"]),
    replicas=st.integers(1, 3),
    turns=st.integers(1, 3),
    env_fails=st.sampled_from([0.0, 0.1]),
    env_hangs=st.sampled_from([0.0, 0.05]),
    train_s=st.sampled_from([0.0, 1.0, 20.0]),
    order=st.sampled_from(["together", "one_by_one"]),
    validate_every=st.integers(0, 2),
    evaluation_problems=st.integers(0, 2),
    chance=st.integers(0, 10**6),
)
DEATHS = st.none() | st.floats(0.0, 20.0)  # when the first of several replicas dies


def check(plan: Plan, dies_after: float | None) -> None:
    """The run ends; its bound and its account hold at every step."""

    async def work() -> Simulation:
        with TemporaryDirectory() as root:
            simulation = Simulation(plan, Path(root))
            running = asyncio.create_task(simulation.run())
            if dies_after is not None and plan.replicas > 1:
                await asyncio.wait({running}, timeout=dies_after)
                simulation.replicas[0].is_dead = True
            await running
            return simulation

    simulation = run_virtually(work())
    for record in simulation.recorder.steps:
        assert record.totals is not None
        require_sums(record.totals)
    consumed_at = -1
    for batch in simulation.trainer.batches:
        consumed_at += 1
        ages = consumed_at - batch.versions[batch.loss_mask]
        assert ages.max() <= plan.staleness
    assert [record.step for record in simulation.recorder.steps] == list(
        range(1, plan.num_steps + 1)
    )
    assert simulation.ledger.groups_trained == plan.num_steps * plan.groups_per_step


@hypothesis_settings(max_examples=60, deadline=None)
@given(plan=PLANS, dies_after=DEATHS)
def test_whatever_happens_the_bound_holds_the_account_adds_up_and_the_run_ends(
    plan: Plan, dies_after: float | None
) -> None:
    check(plan, dies_after)


@pytest.mark.soak
@hypothesis_settings(max_examples=1000, deadline=None, derandomize=False)
@given(plan=PLANS, dies_after=DEATHS)
def test_the_same_a_thousand_times(plan: Plan, dies_after: float | None) -> None:
    """Other cases each time."""
    check(plan, dies_after)
