"""Fixed problems: the same rollouts however many run at a time, and nothing twice after a kill."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.fast.observability.test_metrics import make_group, make_rollout
from tests.support.rollouts import SCRIPT, CountingEnv, Factory, ScriptedGenerate, make_rollouter
from torchtitan_rl.observability.rollouts import rollout_from_json, rollout_to_json
from torchtitan_rl.rollout.rollouter import all_failed_alike, describe_failures, roll_out_problems
from torchtitan_rl.types import Problem, Rollout, RolloutGroup, RolloutStatus

PROBLEMS = [Problem(problem_id=f"p{number}", data={}) for number in range(4)]
SAMPLES = 3


def evaluate(
    *, kept: dict[str, Rollout] | None = None, groups_at_once: int | None = None
) -> tuple[tuple[RolloutGroup, ...], list[Rollout], ScriptedGenerate]:
    """The groups, the rollouts that were reported, and the generator."""
    generate = ScriptedGenerate(SCRIPT)
    reported: list[Rollout] = []
    groups = asyncio.run(
        roll_out_problems(
            make_rollouter(Factory(CountingEnv), generate=generate),
            PROBLEMS,
            samples=SAMPLES,
            seed=3,
            temperature=1.0,
            groups_at_once=groups_at_once,
            kept=kept,
            on_rollout=reported.append,
        )
    )
    return groups, reported, generate


WHOLE, ALL, _ = evaluate()


@given(st.sets(st.sampled_from([one.rollout_id for one in ALL])))
def test_finished_rollouts_are_kept_and_not_run_again(names: set[str]) -> None:
    kept = {one.rollout_id: one for one in ALL if one.rollout_id in names}
    groups, reported, generate = evaluate(kept=kept)
    assert groups == WHOLE
    assert {one.rollout_id for one in reported} == {one.rollout_id for one in ALL} - names
    assert not names & {one.session_id for one in generate.requests}


def test_a_rollout_that_was_written_is_read_as_it_was() -> None:
    for group in WHOLE:
        for rollout in group.rollouts:
            assert rollout_from_json(rollout_to_json(group, rollout)) == rollout


def test_causes_that_differ_in_ids_addresses_and_numbers_are_one_cause() -> None:
    failed = make_rollout(None, status=RolloutStatus.GENERATION_ERROR)
    refused = "'e0/p 1/r3/t2' refused: ConnectionError at 127.0.0.1:4711, <object at 0x7f21>, {} s"
    alike = [
        replace(failed, rollout_id=f"e0/p {n}/r{n}", cause=f"request 'e0/p {n}/r{n}/t2': {text}")
        for n, text in enumerate([refused.format(1.5), refused.format("2")])
    ]
    other = replace(failed, cause="request 'e0/p 1/r3/t2': no disk")
    text = describe_failures([make_group(*alike)])
    assert text.endswith("(2x)")
    assert "at 127.0.0.1:4711" in text  # one of them as it is
    assert all_failed_alike([make_group(alike[0]), make_group(alike[1])])
    assert not all_failed_alike([make_group(*alike, other)])
    assert not all_failed_alike([make_group(*alike, make_rollout(1.0))])
