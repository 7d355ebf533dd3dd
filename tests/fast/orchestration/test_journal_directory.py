"""The journal of a run over checkpoints, kills and resumptions."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fast.orchestration.test_journal import append
from tests.support.turns import turn
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.rollout.recorded import RecordedRollout, usable_turns, with_turn


def sampled(index: int, version: int, salt: int = 0):
    return turn((index,), (index, salt), versions=[version])


def record(*turns) -> dict[str, RecordedRollout]:
    return {"a": RecordedRollout(rollout_id="a", turns=turns)}


def begun(path, step=0) -> JournalDirectory:
    journals = JournalDirectory(path)
    journals.start_lineage(step, {}, {})
    return journals


def names(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_file_a_checkpoint_step(tmp_path):
    journals = begun(tmp_path / "journal")
    journals.begin(10)
    journals.begin(1_000_000)
    assert names(tmp_path / "journal") == [
        "step-000000.jsonl",
        "step-000010.jsonl",
        "step-1000000.jsonl",
    ]


def test_without_a_journal_there_is_what_the_checkpoint_holds(tmp_path):
    base = record(sampled(0, 0))
    assert JournalDirectory(tmp_path / "none").restore(5, base) == base


def test_nothing_can_be_appended_before_a_file_is_begun(tmp_path):
    with pytest.raises(JournalError, match="no journal was begun"):
        append(JournalDirectory(tmp_path), "a", 0, sampled(0, 0))


def test_that_steps_file_and_later_ones_are_read_and_earlier_ones_are_not(tmp_path):
    one, two, three = sampled(0, 0), sampled(1, 0), sampled(2, 0)
    journals = begun(tmp_path)
    append(journals, "a", 0, one)
    append(journals, "trained before 5", 0, one)
    journals.begin(5)
    append(journals, "a", 1, two)
    journals.begin(10)
    append(journals, "a", 2, three)
    after = JournalDirectory(tmp_path)
    assert after.restore(5, record(one)) == record(one, two, three)
    assert after.restore(10, record(one, two)) == record(one, two, three)
    assert after.restore(0, {})["a"] == record(one, two, three)["a"]


def test_a_turn_that_was_dropped_at_a_resume_does_not_come_back_at_the_next(tmp_path):
    one, two, new = sampled(0, 0), sampled(1, 9), sampled(1, 0, salt=1)
    journals = begun(tmp_path)
    append(journals, "a", 0, one)
    append(journals, "a", 1, two)
    journals.begin(5)  # its checkpoint was never finished
    append(journals, "a", 2, sampled(2, 9))

    second = JournalDirectory(tmp_path)
    second.start_lineage(0, record(one), {})
    assert JournalDirectory(tmp_path).restore(0, {}) == record(one)
    append(second, "a", 1, new)
    assert JournalDirectory(tmp_path).restore(0, {}) == record(one, new)
    second.begin(5)
    assert JournalDirectory(tmp_path).restore(5, record(one, new)) == record(one, new)


def test_a_later_file_of_an_older_lineage_is_not_read(tmp_path):
    """As where a kill came between the new file's rename and the deletion of older ones."""
    one, two = sampled(0, 0), sampled(1, 9)
    journals = begun(tmp_path)
    append(journals, "a", 0, one)
    journals.begin(5)
    append(journals, "a", 1, two)
    older = (tmp_path / "step-000005.jsonl").read_bytes()
    JournalDirectory(tmp_path).start_lineage(0, record(one), {})
    assert names(tmp_path) == ["step-000000.jsonl"]
    (tmp_path / "step-000005.jsonl").write_bytes(older)
    third = JournalDirectory(tmp_path)
    assert third.restore(0, {}) == record(one)
    third.start_lineage(0, record(one), {})
    assert JournalDirectory(tmp_path).restore(0, {}) == record(one)


def test_a_second_checkpoint_of_one_step_keeps_what_came_after_the_first(tmp_path):
    one, two = sampled(0, 0), sampled(1, 0)
    journals = begun(tmp_path, 5)
    append(journals, "a", 0, one)
    journals.begin(5)
    append(journals, "a", 1, two)
    assert JournalDirectory(tmp_path).restore(5, {}) == record(one, two)
    assert JournalDirectory(tmp_path).restore(5, record(one)) == record(one, two)


def test_a_kill_while_the_new_file_is_written_leaves_the_old_one(tmp_path):
    one = sampled(0, 0)
    append(begun(tmp_path), "a", 0, one)
    (tmp_path / "step-000000.tmp").write_bytes(b"half a li")
    assert JournalDirectory(tmp_path).restore(0, {}) == record(one)


def test_what_the_checkpoint_holds_is_not_written_again(tmp_path):
    one, two = sampled(0, 0), sampled(1, 0)
    base = record(one)
    journals = JournalDirectory(tmp_path)
    journals.start_lineage(5, record(one, two), base)
    assert len((tmp_path / "step-000005.jsonl").read_bytes().splitlines()) == 2
    assert JournalDirectory(tmp_path).restore(5, base) == record(one, two)


def test_a_rollout_that_began_anew_since_the_checkpoint_is_written_whole(tmp_path):
    base = record(sampled(0, 0), sampled(1, 0))
    anew = record(sampled(0, 1, salt=7), sampled(1, 1, salt=7), sampled(2, 1, salt=7))
    JournalDirectory(tmp_path).start_lineage(5, anew, base)
    assert JournalDirectory(tmp_path).restore(5, base) == anew


def test_what_was_dropped_once_does_not_come_back_from_the_checkpoint(tmp_path):
    base = record(sampled(0, 0))
    dropped = {"a": RecordedRollout(rollout_id="a")}
    JournalDirectory(tmp_path).start_lineage(5, dropped, base)
    assert JournalDirectory(tmp_path).restore(5, base) == {}


def test_a_running_turn_of_the_checkpoint_that_was_dropped_does_not_come_back(tmp_path):
    kept = record(sampled(0, 0))
    running = sampled(1, 0).completion
    base = {name: replace(one, partial=running) for name, one in kept.items()}
    JournalDirectory(tmp_path).start_lineage(5, kept, base)
    assert JournalDirectory(tmp_path).restore(5, base) == kept


def test_files_of_checkpoints_that_are_gone_are_deleted(tmp_path):
    journals = begun(tmp_path)
    for step in (5, 10, 15):
        journals.begin(step)
    journals.prune(10)
    assert names(tmp_path) == ["step-000010.jsonl", "step-000015.jsonl"]
    append(journals, "a", 0, sampled(0, 0))


ROLLOUTS = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.tuples(st.just("turn"), ROLLOUTS, st.integers(0, 1)),
    st.tuples(st.just("anew"), ROLLOUTS, st.integers(0, 1)),
    st.tuples(st.just("step")),
    st.tuples(st.just("checkpoint"), st.booleans()),
    st.tuples(st.just("kill")),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=40))
@example(
    [
        ("turn", "a", 0),
        ("checkpoint", True),
        ("step",),
        ("anew", "a", 0),
        ("kill",),
        ("kill",),
    ]
)
@example(
    [
        ("step",),
        ("turn", "a", 0),
        ("checkpoint", False),
        ("turn", "a", 0),
        ("anew", "a", 0),
        ("checkpoint", True),
        ("kill",),
    ]
)
def test_any_history_resumes_with_exactly_the_usable_turns_of_the_moment_of_the_kill(events):
    """``live`` is what the process has in mind; ``saved`` the newest whole checkpoint.

    Where the newest turns of a rollout are of no use after the kill, those of an earlier attempt
    may be what is found; never a mixture."""
    with tempfile.TemporaryDirectory() as folder:
        journals = JournalDirectory(Path(folder))
        journals.start_lineage(0, {}, {}, version=0)
        step, live = 0, {}
        saved_step, saved = 0, {}
        attempts = {}
        for salt, (event, *details) in enumerate(events):
            if event in ("turn", "anew"):
                name, age = details
                known = live.get(name) or RecordedRollout(rollout_id=name)
                index = 0 if event == "anew" else len(known.turns)
                new = sampled(index, max(0, step - age), salt)
                if index > 0 and salt % 2:
                    before = known.turns[-1]
                    prompt = before.prompt_token_ids + before.completion.token_ids
                    new = replace(new, prompt_token_ids=prompt + new.prompt_token_ids)
                live[name] = with_turn(known, index, new, None)
                journals.append(live[name])
                attempts.setdefault(name, []).append(live[name].turns)
            elif event == "step":
                step += 1
            elif event == "checkpoint":
                journals.begin(step, version=step)
                (is_whole,) = details
                if is_whole:
                    saved_step, saved = step, dict(live)
                    journals.prune(saved_step)
            elif event == "kill":
                journals = JournalDirectory(Path(folder))
                found = journals.restore(saved_step, saved)
                usable = usable_at(saved_step, found)
                for name, turns in usable_at(saved_step, live).items():
                    if turns == live[name]:
                        assert usable[name] == turns
                for name, kept in usable.items():
                    assert any(kept.turns == turns[: len(kept.turns)] for turns in attempts[name])
                journals.start_lineage(saved_step, usable, saved, version=saved_step)
                step, live = saved_step, {k: v for k, v in usable.items() if v.turns}
                attempts = {name: [one.turns] for name, one in usable.items()}


def usable_at(version: int, rollouts):
    return {
        name: usable_turns(entry, restored_version=version, admitted_version=0)[0]
        for name, entry in rollouts.items()
    }


def test_a_rollout_that_began_anew_in_a_file_that_left_it_out_is_not_mixed_with_its_past(tmp_path):
    """Its turns of before are of the checkpoint's version, those after are not, but one that came
    from a replica that lags behind is."""
    journals = JournalDirectory(tmp_path)
    journals.start_lineage(5, {}, {}, version=5)
    first, second = sampled(0, 5), sampled(1, 5)
    append(journals, "a", 0, first)
    append(journals, "a", 1, second)
    append(journals, "a", 0, sampled(0, 6, salt=1))
    append(journals, "a", 1, sampled(1, 6, salt=1))
    journals.begin(6, version=6)  # its checkpoint is torn
    append(journals, "a", 2, sampled(2, 5, salt=1))
    assert JournalDirectory(tmp_path).restore(5, {}) == record(first, second)


def test_without_checkpoints_a_journal_is_never_longer_than_what_one_version_sampled(tmp_path):
    journals = JournalDirectory(tmp_path)
    journals.start_lineage(0, {}, {}, version=0)
    for version in range(50):
        append(journals, f"g{version}/r0", 0, sampled(0, version))
        if version == 0:
            size = (tmp_path / "step-000000.jsonl").stat().st_size
    assert (tmp_path / "step-000000.jsonl").stat().st_size == size
    assert list(JournalDirectory(tmp_path).restore(0, {})) == ["g0/r0"]


def test_a_second_checkpoint_of_one_step_goes_on_from_its_own_mark(tmp_path):
    """The turns before the mark are of the first: the second may hold their group as finished, or
    not at all."""
    one, two, three = sampled(0, 0), sampled(1, 0), sampled(2, 0)
    journals = begun(tmp_path, 5)
    append(journals, "finished", 1, two)
    append(journals, "running", 0, one)
    append(journals, "sampled again", 1, two)  # as another attempt, which has no turn yet
    append(journals, "began and finished", 0, one)
    mark = journals.begin(5)
    append(journals, "running", 1, two)
    again = {"sampled again": RecordedRollout(rollout_id="sampled again")}
    base = {"running": RecordedRollout(rollout_id="running", turns=(one,)), **again}
    after = JournalDirectory(tmp_path)
    found = after.restore(5, base, mark=mark)
    assert found == {"running": RecordedRollout(rollout_id="running", turns=(one, two)), **again}
    assert after.passed_over == []
    names_of_first = ("finished", "sampled again")
    first = {name: RecordedRollout(rollout_id=name, turns=(one,)) for name in names_of_first}
    assert after.restore(5, first)["finished"].turns == (one, two)
    assert after.restore(5, first)["running"].turns == (one, two)

    after.start_lineage(5, found, base, mark=mark)
    assert JournalDirectory(tmp_path).restore(5, base, mark=mark) == found
    third = after.begin(5)
    assert third > mark
    append(after, "running", 2, three)
    assert JournalDirectory(tmp_path).restore(5, found, mark=third)["running"].turns == (
        one,
        two,
        three,
    )
    assert len(JournalDirectory(tmp_path).restore(5, base, mark=mark)["running"].turns) == 3


def test_a_second_checkpoint_of_one_step_needs_no_journal_that_can_be_written(tmp_path):
    """All lines are of before it, and none comes after it."""
    one, two = sampled(0, 0), sampled(1, 0)
    journals = begun(tmp_path, 5)
    append(journals, "a", 1, two)
    journals._journal._file = FileIO("/dev/full", "w")
    with pytest.raises(JournalError, match="No space left"):
        append(journals, "a", 2, sampled(2, 0))
    append(journals, "a", 2, sampled(2, 0))  # a failure is raised once
    mark = journals.begin(5)
    found = JournalDirectory(tmp_path)
    assert found.restore(5, record(one), mark=mark) == record(one)
    assert found.restore(5, record(one)) == record(one, two)
