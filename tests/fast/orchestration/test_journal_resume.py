"""A group whose process is killed at once after any of its turns, continued from the journal."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.support.resuming import SIZE, Replaying, Run, Saving, contents
from tests.support.rollouts import PROBLEM
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.rollout.recorded import usable_turns


def _roll_out_and_die(path, maker, num_turns, recorded, base) -> None:
    journals = JournalDirectory(path)
    journals.start_lineage(0, recorded or {}, base or {})
    turns = 0

    def on_turn(recorded) -> None:
        nonlocal turns
        journals.append(recorded)
        turns += 1
        if turns == num_turns:
            os.kill(os.getpid(), signal.SIGKILL)

    group = Run(maker).rollouter.run_group(
        "g", PROBLEM, size=SIZE, seed=7, recorded=recorded or None, on_turn=on_turn
    )
    asyncio.run(group)


def killed_after(path, maker, num_turns: int, recorded=(), base=None) -> None:
    """Roll a group out in a child process that is killed with its turn number ``num_turns``."""
    child = os.fork()
    if child == 0:
        try:
            _roll_out_and_die(path, maker, num_turns, recorded, base)
        finally:
            os._exit(1)  # it should not have come so far
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("num_turns", range(1, 3 * SIZE + 1))
def test_kill_9_after_any_turn_costs_only_the_turns_that_were_running(tmp_path, num_turns):
    undisturbed = Run(Replaying).whole()
    killed_after(tmp_path, Replaying, num_turns)
    recorded = JournalDirectory(tmp_path).restore(0, {})
    assert sum(len(entry.turns) for entry in recorded.values()) == num_turns
    after = Run(Replaying)
    assert contents(after.whole(recorded.values())) == contents(undisturbed)
    assert len(after.generate.requests) == 3 * SIZE - num_turns


def test_a_state_in_the_journal_brings_its_environment_back(tmp_path):
    killed_after(tmp_path, Saving, 4)
    after = Run(Saving)
    group = after.whole(JournalDirectory(tmp_path).restore(0, {}).values())
    assert after.discarded == []
    assert len(after.generate.requests) == 2
    for rollout in group.rollouts:
        tokens = sum(sum(turn.completion.token_ids) for turn in rollout.turns)
        assert rollout.reward == 2.0 * tokens


def test_a_run_that_is_killed_again_and_again_still_samples_each_turn_once(tmp_path):
    undisturbed = Run(Replaying).whole()
    killed_after(tmp_path, Replaying, 1)
    for killed in range(1, 3 * SIZE):
        found = JournalDirectory(tmp_path).restore(0, {})
        assert sum(len(entry.turns) for entry in found.values()) == killed
        usable = {
            name: usable_turns(entry, restored_version=0, admitted_version=0)[0]
            for name, entry in found.items()
        }
        killed_after(tmp_path, Replaying, 1, usable, base={})
    after = Run(Replaying)
    recorded = JournalDirectory(tmp_path).restore(0, {})
    assert contents(after.whole(recorded.values())) == contents(undisturbed)
    assert after.generate.requests == []
    assert after.factory.made == []
