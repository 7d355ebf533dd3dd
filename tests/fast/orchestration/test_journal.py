"""One journal file: what is appended comes back, whatever kills the process."""

from __future__ import annotations

import os
import signal
import tracemalloc
from io import FileIO

import pytest

from tests.support.turns import rollout, turn
from torchtitan_rl.orchestration.journal import Journal, JournalError
from torchtitan_rl.orchestration.journal_directory import Replay
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout, usable_turns

FIRST = turn((1, 2), (3, 4), reward=0.1, text="é\n")
SECOND = turn((1, 2, 3, 4, 0), (5,))
THIRD = turn((9, 9), (6,))
STATE = EnvState(
    answer=Observation(prompt_token_ids=(1, 2, 3, 4, 0), max_tokens=7), state={"deck": [1, 2]}
)


OTHER = turn((77,), (77,))


def append(journal, rollout_id, index, turn, state=None) -> None:
    """Append a turn that extends none of those before it."""
    states = {} if state is None else {index + 1: state}
    turns = (OTHER,) * index + (turn,)
    journal.append(RecordedRollout(rollout_id=rollout_id, turns=turns, env_states=states))


def read_journals(paths, base=None) -> dict[str, RecordedRollout]:
    replay = Replay(base)
    for path in paths:
        replay.read(path)
    return replay.rollouts


def write(path, *records) -> None:
    journal = Journal(path)
    for record in records:
        append(journal, *record)
    journal.close()


def test_what_is_appended_comes_back_by_rollout(tmp_path):
    path = tmp_path / "new" / "step-000000.jsonl"
    other = turn((7,), (8,))
    write(
        path,
        ("a", 0, FIRST, STATE),
        ("b", 0, other, None),
        ("a", 1, SECOND, None),
        ("a", 2, THIRD, None),
    )
    found = read_journals([path])
    assert found["a"].turns == (FIRST, SECOND, THIRD)
    assert found["a"].env_states == {1: STATE}
    assert found["a"].env_state is None
    assert found["b"] == RecordedRollout(rollout_id="b", turns=(other,))


def test_turns_go_on_behind_those_of_the_checkpoint_and_of_earlier_files(tmp_path):
    base = RecordedRollout(
        rollout_id="a",
        turns=(FIRST,),
        env_states={1: STATE},
        partial=SECOND.completion,
        prompt_token_ids=(1, 2, 3, 4, 0),
    )
    write(tmp_path / "1", ("a", 1, SECOND, None))
    write(tmp_path / "2", ("a", 2, THIRD, None))
    found = read_journals([tmp_path / "1", tmp_path / "2"], {"a": base})
    assert found["a"].turns == (FIRST, SECOND, THIRD)
    assert found["a"].partial is None
    assert found["a"].prompt_token_ids is None
    assert found["a"].env_states == {1: STATE}


def test_a_rollout_of_the_checkpoint_without_later_turns_is_as_it_was(tmp_path):
    base = RecordedRollout(rollout_id="a", turns=(FIRST,), partial=SECOND.completion)
    write(tmp_path / "1", ("b", 0, THIRD, None))
    assert read_journals([tmp_path / "1"], {"a": base})["a"] is base


def test_a_turn_that_comes_again_replaces_the_old_one_and_all_behind_it(tmp_path):
    again = turn((*SECOND.prompt_token_ids, 5, 9), (8, 8))
    write(tmp_path / "1", ("a", 0, FIRST, STATE), ("a", 1, SECOND, None), ("a", 0, again, None))
    assert read_journals([tmp_path / "1"])["a"] == RecordedRollout(rollout_id="a", turns=(again,))


def test_a_last_line_torn_at_any_byte_is_dropped_and_nothing_else(tmp_path):
    path = tmp_path / "j"
    write(path, ("a", 0, FIRST, STATE), ("a", 1, SECOND, None))
    content = path.read_bytes()
    starts = [0] + [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    edges = {start + i for start in starts for i in (-1, 0, 1)} & set(range(len(content) + 1))
    for end in sorted({*range(0, len(content), 20), *edges}):
        path.write_bytes(content[:end])
        found = read_journals([path])
        whole_lines = sum(start <= end for start in starts[1:])
        turns = found["a"].turns if found else ()
        assert turns == (FIRST, SECOND)[: max(0, whole_lines - 1)]


def test_a_damaged_last_line_is_dropped(tmp_path):
    path = tmp_path / "j"
    write(path, ("a", 0, FIRST, None), ("a", 1, SECOND, None))
    path.write_bytes(path.read_bytes()[:-9] + b"\0" * 8 + b"\n")
    assert read_journals([path])["a"].turns == (FIRST,)


def test_a_damaged_line_in_the_middle_is_an_error_with_file_and_line(tmp_path):
    path = tmp_path / "step-000004.jsonl"
    write(path, ("a", 0, FIRST, None), ("a", 1, SECOND, None))
    content = path.read_bytes()
    first_line = content.index(b"\n") + 1
    for at in range(first_line, content.index(b"\n", first_line), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(JournalError, match=r"step-000004\.jsonl, line 2"):
            read_journals([path])


def test_a_missing_turn_is_an_error_with_file_and_line(tmp_path):
    write(tmp_path / "j", ("a", 0, FIRST, None), ("a", 2, THIRD, None))
    with pytest.raises(JournalError, match=r"j, line 3: .*turn 2 follows turn 0"):
        read_journals([tmp_path / "j"])


@pytest.mark.parametrize("fault", ["a missing turn", "a damaged line"])
def test_nothing_of_a_file_with_a_fault_counts(tmp_path, fault):
    path = tmp_path / "2"
    write(tmp_path / "1", ("b", 0, FIRST, None))
    write(path, ("b", 1, SECOND, None), ("a", 0, FIRST, None), ("a", 2, THIRD, None))
    if fault == "a damaged line":
        path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"', 1))
    replay = Replay()
    replay.read(tmp_path / "1")
    with pytest.raises(JournalError):
        replay.read(path)
    assert replay.rollouts == {"b": RecordedRollout(rollout_id="b", turns=(FIRST,))}


def test_later_turns_of_a_rollout_that_ended_before_the_checkpoint_are_passed_over(tmp_path):
    write(tmp_path / "j", ("a", 1, SECOND, None), ("b", 0, FIRST, None))
    assert list(read_journals([tmp_path / "j"])) == ["b"]


def test_kill_9_loses_nothing_that_was_appended(tmp_path):
    path = tmp_path / "j"
    child = os.fork()
    if child == 0:
        journal = Journal(path)
        for index in range(50):
            append(journal, "a", index, turn((index,), (index,)))
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(read_journals([path])["a"].turns) == 50


def test_a_full_disk_is_an_error_and_the_half_line_stays_the_last(tmp_path):
    journal = Journal(tmp_path / "j")
    append(journal, "a", 0, FIRST)
    journal.close()
    journal._file = FileIO("/dev/full", "w")
    with pytest.raises(JournalError, match="No space left"):
        append(journal, "a", 1, SECOND)
    with pytest.raises(JournalError, match="closed"):
        append(journal, "a", 1, SECOND)
    with pytest.raises(JournalError, match="No space left"):
        Journal(type(journal.path)("/dev/full"))
    assert read_journals([journal.path])["a"].turns == (FIRST,)


def recorded(*turns, **rest) -> RecordedRollout:
    return RecordedRollout(rollout_id="a", turns=turns, **rest)


@pytest.mark.parametrize(
    ("restored", "admitted", "kept", "lost_tokens"),
    [(5, 3, 3, 0), (4, 3, 1, 3), (3, 3, 1, 3), (2, 0, 0, 4), (5, 4, 0, 4), (9, 0, 3, 0)],
)
def test_turns_are_usable_up_to_the_first_that_is_too_new_or_too_old(
    restored, admitted, kept, lost_tokens
):
    turns = (
        turn((1,), (2,), versions=[3]),
        turn((1, 2), (3, 4), versions=[4, 5]),
        turn((1, 2, 3), (5,), versions=[3]),
    )
    states = dict.fromkeys(range(4), STATE)
    entry = recorded(*turns, env_states=states, prompt_token_ids=(8,))
    usable, lost = usable_turns(entry, restored_version=restored, admitted_version=admitted)
    assert usable.turns == turns[:kept]
    assert lost == lost_tokens
    assert set(usable.env_states) == set(range(kept + 1))
    assert usable.prompt_token_ids == ((8,) if kept == 3 else None)


def test_the_tokens_of_a_running_turn_are_whole_or_gone():
    partial = turn((1,), (2, 3), versions=[3, 4]).completion
    entry = recorded(FIRST, partial=partial, prompt_token_ids=(1,))
    assert usable_turns(entry, restored_version=4, admitted_version=0) == (entry, 0)
    usable, lost = usable_turns(entry, restored_version=3, admitted_version=0)
    assert (usable.turns, usable.partial, lost) == ((FIRST,), None, 2)


def test_a_rollout_that_had_ended_goes_on_where_one_of_its_turns_is_dropped():
    ended = rollout(FIRST, turn((1, 2), (3,), versions=[2]))
    entry = recorded(*ended.turns, ended=ended)
    assert usable_turns(entry, restored_version=2, admitted_version=0) == (entry, 0)
    expected = (recorded(FIRST), 1)
    assert usable_turns(entry, restored_version=1, admitted_version=0) == expected


def test_a_completion_without_tokens_is_of_every_version():
    entry = recorded(turn((1,), (), versions=[9]))
    assert usable_turns(entry, restored_version=0, admitted_version=0) == (entry, 0)


def test_a_journal_keeps_little_of_each_rollout_in_memory(tmp_path):
    """Whole last turns were 461 MiB for 1,500 rollouts of 7,000 tokens."""
    journal = Journal(tmp_path / "j")
    tracemalloc.start()
    for number in range(100):
        prompt = tuple(range(1000 * number, 1000 * number + 1000))
        append(journal, f"g{number}/r0", 0, turn(prompt, prompt))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100 * 1000


def test_only_unfinished_rollouts_that_were_left_out_are_kept_in_memory(tmp_path):
    journal = Journal(tmp_path / "j", version=0)
    too_new = turn((1,), (2,), versions=[1])
    append(journal, "g/r0", 0, FIRST, STATE)
    append(journal, "g/r1", 0, too_new, EnvState(answer=Terminal(reward=1.0)))
    append(journal, "g/r2", 0, too_new)
    append(journal, "g/r3", 0, too_new)
    append(journal, "g/r3", 1, SECOND, EnvState(answer=Terminal(reward=1.0)))
    append(journal, "h/r0", 0, too_new)
    assert journal.cut_off() == ["g/r2", "h/r0"]
    journal.forget("g")
    assert journal.cut_off() == ["h/r0"]


def test_a_long_conversation_takes_linear_space(tmp_path):
    journal = Journal(tmp_path / "j")
    prompt, turns = (1, 2, 3), []
    sizes = []
    for _ in range(20):
        turns.append(turn(prompt, range(100, 200)))
        prompt = (*prompt, *range(100, 200), 0)
        size = journal.path.stat().st_size
        journal.append(recorded(*turns))
        sizes.append(journal.path.stat().st_size - size)
    assert max(sizes) < min(sizes) + 50
    assert read_journals([journal.path])["a"].turns == tuple(turns)


def test_a_prompt_that_only_seems_to_extend_the_turn_before_is_written_whole(tmp_path):
    edited = turn((1, 9, 3, 4, 0), (5,))
    shorter = turn((1, 9), (5,))
    Journal(tmp_path / "j").append(recorded(FIRST, edited, shorter), 0)
    assert read_journals([tmp_path / "j"])["a"].turns == (FIRST, edited, shorter)


def test_turns_that_no_run_can_go_on_with_are_left_out_with_what_comes_behind_them(tmp_path):
    old, new = turn((1,), (2,), versions=[4]), turn((1, 2), (3,), versions=[5])
    lagging = turn((1, 2, 3), (4,), versions=[4])
    empty = turn((1,), (), versions=[9])
    journal = Journal(tmp_path / "j", version=4)
    size = journal.path.stat().st_size
    append(journal, "b/r0", 0, new)
    append(journal, "b/r0", 1, lagging)
    assert journal.path.stat().st_size == size
    for index, one in enumerate((old, new, lagging)):
        append(journal, "a/r0", index, one)
    append(journal, "c/r0", 0, empty)
    assert journal.cut_off() == ["a/r0", "b/r0"]
    found = read_journals([journal.path])
    assert {name: one.turns for name, one in found.items()} == {"a/r0": (old,), "c/r0": (empty,)}
    append(journal, "a/r0", 0, old)  # it begins anew
    append(journal, "a/r0", 1, lagging)
    assert journal.cut_off() == ["b/r0"]
    assert read_journals([journal.path])["a/r0"].turns == (old, lagging)
