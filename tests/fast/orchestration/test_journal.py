"""The journal over checkpoints, kills, damage and resumptions."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import signal
import sqlite3
import tempfile
import time
import traceback
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fast.test_files import files_of_at_most
from tests.support.resuming import SIZE, Replaying, Run, contents
from tests.support.rollouts import PROBLEM
from tests.support.turns import turn
from torchtitan_rl.orchestration.journal import Journal, JournalError, JournalUnreadableError
from torchtitan_rl.rollout.env import Observation
from torchtitan_rl.rollout.records import EnvState, RecordedRollout, usable_turns, with_turn

FIRST = turn((1, 2), (3, 4), reward=0.1, text="é\n")
SECOND = turn((1, 2, 3, 4, 0), (5,))
THIRD = turn((9, 9), (6,))
STATE = EnvState(
    observation=Observation(prompt_token_ids=(1, 2, 3, 4, 0), max_tokens=7),
    state=f'{{"deck": [1, {2**70}]}}',
)


def sampled(index: int, version: int, salt: int = 0):
    return turn((index,), (index, salt), versions=[version])


def recorded(*turns, name="a", **rest) -> RecordedRollout:
    return RecordedRollout(rollout_id=name, turns=turns, **rest)


def begun(folder: Path, step: int = 0, version: int | None = None) -> Journal:
    journal = Journal(folder / "journal")
    journal.start(step, {}, {}, version=version)
    return journal


def found_in(folder: Path, step: int = 0, base=None, **options) -> dict[str, RecordedRollout]:
    return Journal(folder / "journal").restore(step, base or {}, **options)


def test_what_is_appended_comes_back_by_rollout(tmp_path):
    journal = begun(tmp_path)
    journal.append(recorded(FIRST, env_states={1: STATE}))
    journal.append(recorded(THIRD, name="b"))
    journal.append(recorded(FIRST, SECOND, env_states={1: STATE}))
    journal.append(recorded(FIRST, SECOND, THIRD, env_states={1: STATE}))
    assert found_in(tmp_path) == {
        "a": recorded(FIRST, SECOND, THIRD, env_states={1: STATE}),
        "b": recorded(THIRD, name="b"),
    }


def test_a_rollout_of_which_a_turn_is_missing_ends_before_it(tmp_path):
    """Also one that ended before the checkpoint, which has no turns of it (item 1 of issue 12)."""
    begun(tmp_path).append(recorded(FIRST, SECOND, THIRD))
    assert found_in(tmp_path) == {}
    assert found_in(tmp_path, base={"a": recorded(FIRST)}) == {"a": recorded(FIRST)}
    other_second = {"a": recorded(FIRST, THIRD)}
    assert found_in(tmp_path, base=other_second) == other_second


def test_a_second_checkpoint_of_one_step_continues_from_its_own_mark(tmp_path):
    one, two, three = sampled(0, 0), sampled(1, 0), sampled(2, 0)
    journal = begun(tmp_path, 5)
    journal.append(recorded(one))
    mark = journal.begin(5)
    journal.append(recorded(one, two))
    base = {"a": recorded(one)}
    assert found_in(tmp_path, 5) == {"a": recorded(one, two)}  # the second was not complete
    assert found_in(tmp_path, 5, base, mark=mark) == {"a": recorded(one, two)}

    after = Journal(tmp_path / "journal")
    after.start(5, {"a": recorded(one, two)}, base, mark=mark)
    third = after.begin(5)
    assert third > mark
    after.append(recorded(one, two, three))
    expected = {"a": recorded(one, two, three)}
    assert found_in(tmp_path, 5, {"a": recorded(one, two)}, mark=third) == expected
    assert found_in(tmp_path, 5, base, mark=mark) == expected


def test_what_a_resumed_run_does_not_continue_with_never_comes_back(tmp_path):
    journal = begun(tmp_path, 5)
    journal.append(recorded(FIRST, SECOND), 0)
    journal.begin(10)
    journal.append(recorded(FIRST, SECOND, THIRD))
    Journal(tmp_path / "journal").start(5, {"a": recorded(FIRST)}, {})
    assert found_in(tmp_path, 5) == {"a": recorded(FIRST)}


def test_turns_of_checkpoints_that_are_gone_are_deleted(tmp_path):
    journal = begun(tmp_path)
    journal.append(recorded(FIRST))
    journal.begin(10)
    journal.append(recorded(FIRST, name="b"))
    journal.prune(10)
    assert list(found_in(tmp_path)) == ["b"]


ROLLOUTS = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.tuples(st.just("turn"), ROLLOUTS, st.integers(0, 1)),
    st.tuples(st.just("again"), ROLLOUTS, st.integers(0, 1)),
    st.tuples(st.just("step")),
    st.tuples(st.just("checkpoint"), st.booleans()),
    st.tuples(st.just("kill")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, max_size=40))
@example([("turn", "a", 0), ("checkpoint", True), ("step",), ("again", "a", 0)] + 2 * [("kill",)])
@example(
    [
        ("step",),
        ("turn", "a", 0),
        ("checkpoint", False),
        ("turn", "a", 0),
        ("again", "a", 0),
        ("checkpoint", True),
        ("kill",),
    ]
)
def test_any_history_resumes_with_exactly_the_usable_turns_of_the_moment_of_the_kill(events):
    """``live`` is what the process has in mind; ``saved`` the newest whole checkpoint.

    Where the newest turns of a rollout are of no use after the kill, those of an earlier attempt
    may be what is found; never a mixture."""
    with tempfile.TemporaryDirectory() as folder:
        journal = begun(Path(folder), version=0)
        step, live = 0, {}
        saved_step, saved_mark, saved = 0, 0, {}
        attempts = {}
        for salt, (event, *details) in enumerate(events):
            if event in ("turn", "again"):
                name, age = details
                known = live.get(name) or recorded(name=name)
                index = 0 if event == "again" else len(known.turns)
                new = sampled(index, max(0, step - age), salt)
                if index > 0 and salt % 2:
                    before = known.turns[-1]
                    prompt = before.prompt_token_ids + before.completion.token_ids
                    new = replace(new, prompt_token_ids=prompt + new.prompt_token_ids)
                live[name] = with_turn(known, index, new, None)
                journal.append(live[name])
                attempts.setdefault(name, []).append(live[name].turns)
            elif event == "step":
                step += 1
            elif event == "checkpoint":
                mark = journal.begin(step, version=step)
                (is_whole,) = details
                if is_whole:
                    saved_step, saved_mark, saved = step, mark, dict(live)
                    journal.prune(saved_step)
            elif event == "kill":
                journal.close()
                journal = Journal(Path(folder) / "journal")
                found = journal.restore(saved_step, saved, mark=saved_mark)
                usable = usable_at(saved_step, found)
                for name, turns in usable_at(saved_step, live).items():
                    if turns == live[name]:
                        assert usable[name] == turns
                for name, kept in usable.items():
                    assert any(kept.turns == turns[: len(kept.turns)] for turns in attempts[name])
                journal.start(saved_step, usable, saved, version=saved_step, mark=saved_mark)
                step, live = saved_step, {k: v for k, v in usable.items() if v.turns}
                attempts = {name: [one.turns] for name, one in usable.items()}
        journal.close()


def usable_at(version: int, rollouts):
    return {
        name: usable_turns(entry, restored_version=version, admitted_version=0)[0]
        for name, entry in rollouts.items()
    }


# Damage and a disk that fails


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"x" * len(content),
        lambda content: content[:-100],
        lambda content: content[:4096] + b"\xff" * (len(content) - 4096),
        lambda content: content.replace(b"tableturns", b"tabl\xffturns").replace(
            b"CREATE", b"CREAT\xff"
        ),
    ],
    ids=["all", "cut", "all but the first page", "schema that sqlite3 cannot quote"],
)
def test_a_run_continues_whatever_is_damaged(tmp_path, damage):
    journal = begun(tmp_path)
    for number in range(20):
        journal.append(recorded(FIRST, name=f"g{number}/r0"))
    journal.close()
    journal.path.write_bytes(damage(journal.path.read_bytes()))
    again = Journal(journal.path)
    assert set(again.restore(0, {"a": recorded(FIRST)})) >= {"a"}
    again.start(0, {"a": recorded(FIRST, SECOND)}, {"a": recorded(FIRST)})
    again.append(recorded(FIRST, SECOND, THIRD))
    found = found_in(tmp_path, base={"a": recorded(FIRST)})
    assert found == {"a": recorded(FIRST, SECOND, THIRD)}


def test_a_changed_byte_of_a_turn_costs_its_rollout_from_there_on(tmp_path):
    journal = begun(tmp_path)
    journal.append(recorded(FIRST, SECOND, THIRD), 0)
    journal.append(recorded(FIRST, name="b"))
    journal._db.execute("UPDATE turns SET body = zeroblob(9) WHERE rollout = 'a' AND turn = 1")
    assert journal.restore(0, {}) == {"a": recorded(FIRST), "b": recorded(FIRST, name="b")}
    assert "a, turn 1: wrong checksum; it is sampled again" in journal.passed_over[0]


@pytest.mark.parametrize("column", ["step", "mark", "rollout", "turn", "previous", "checksum"])
@pytest.mark.parametrize("value", ["NULL", "'y'", "x'78'", "0.5"])
def test_a_row_with_a_column_of_another_type_is_passed_over(tmp_path, column, value):
    journal = begun(tmp_path)
    journal.append(recorded(FIRST))
    journal.append(recorded(FIRST, name="b"))
    journal._db.execute(f"UPDATE turns SET {column} = {value} WHERE rollout = 'b'")
    assert journal.restore(0, {}).get("a") == recorded(FIRST)
    assert journal.restore(0, {}).keys() <= {"a", "y"}


def test_a_journal_of_another_version_is_passed_over(tmp_path):
    journal = begun(tmp_path)
    journal._db.execute("PRAGMA user_version = 99")
    assert journal.restore(0, {}) == {}
    assert "format 99" in journal.passed_over[0]


def test_what_the_system_cannot_read_is_not_passed_over(tmp_path, monkeypatch):
    """Its turns are there and would be sampled again."""
    begun(tmp_path).close()

    def fails(*_, **__):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    monkeypatch.setattr(sqlite3, "connect", fails)
    with pytest.raises(JournalUnreadableError, match=r"journal: disk I/O error"):
        found_in(tmp_path)


def test_a_full_disk_is_raised_once_and_later_turns_wait_for_the_next_checkpoint(tmp_path):
    journal = begun(tmp_path, 5)
    journal.append(recorded(FIRST))
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    long = turn((1, 2, 3, 4, 0), range(9000))
    with pytest.raises(JournalError, match="journal: database or disk is full"):
        journal.append(recorded(FIRST, long))
    journal.append(recorded(FIRST, long, THIRD))
    assert [row.number for row in journal.rows(5)] == [0]
    journal._db.execute("PRAGMA max_page_count = 100000")
    journal.begin(10)
    journal.append(recorded(FIRST, long, THIRD, THIRD))
    base = {"a": recorded(FIRST, long, THIRD)}
    assert found_in(tmp_path, 10, base) == {"a": recorded(FIRST, long, THIRD, THIRD)}


def test_a_resumed_run_that_cannot_write_its_journal_leaves_all_turns_in_it(tmp_path):
    begun(tmp_path).append(recorded(FIRST, SECOND), 0)
    long = recorded(turn((), range(9000)), name="long")
    with files_of_at_most(50_000), pytest.raises(JournalError):
        Journal(tmp_path / "journal").start(0, {"long": long, "a": recorded(FIRST, SECOND)}, {})
    assert found_in(tmp_path) == {"a": recorded(FIRST, SECOND)}


# Cost


def test_a_journal_keeps_little_of_each_rollout_in_memory(tmp_path):
    """Whole last turns were 461 MiB for 1,500 rollouts of 7,000 tokens."""
    journal = begun(tmp_path)
    tracemalloc.start()
    for number in range(100):
        prompt = tuple(range(1000 * number, 1000 * number + 1000))
        journal.append(recorded(turn(prompt, prompt), name=f"g{number}/r0"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100 * 1000


def test_a_long_conversation_takes_linear_space(tmp_path):
    journal = begun(tmp_path)
    prompt, turns = (1, 2, 3), []
    for _ in range(20):
        turns.append(turn(prompt, range(100, 200)))
        prompt = (*prompt, *range(100, 200), 0)
        journal.append(recorded(*turns))
    sizes = [len(row.body) for row in journal.rows()]
    assert max(sizes) < min(sizes) + 50
    assert found_in(tmp_path)["a"].turns == tuple(turns)


# Killed processes


def _roll_out_and_die(path, maker, num_turns, recorded, base) -> None:
    journal = Journal(path / "journal")
    journal.start(0, recorded or {}, base or {})
    turns = 0

    def on_turn(recorded) -> None:
        nonlocal turns
        journal.append(recorded)
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


def refuse_file_locks() -> None:
    """Make all file locks of this process fail, as on storage that has none."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(0x7FFF0000))  # other calls are allowed
    equal = 4
    for command in (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_GETLK):
        number = seccomp.seccomp_syscall_resolve_name(b"fcntl")
        comparison = Comparison(1, equal, command, 0)
        refusal = 0x00050000 | errno.ENOLCK
        assert not seccomp.seccomp_rule_add(context, refusal, number, 1, comparison)
    assert not seccomp.seccomp_load(context)


class Comparison(ctypes.Structure):
    _fields_ = (
        *(("argument", ctypes.c_uint), ("operator", ctypes.c_int)),
        *(("first", ctypes.c_uint64), ("second", ctypes.c_uint64)),
    )


def test_storage_without_file_locks_has_whole_turns_after_a_kill(tmp_path):
    def write_until_killed() -> None:
        refuse_file_locks()
        journal = begun(tmp_path)
        for index in range(100_000):
            journal.append(recorded(turn((index,), range(2000)), name=str(index)))
            if index == 20:
                (tmp_path / "begun").touch()

    def resume() -> None:
        refuse_file_locks()
        (tmp_path / "journal.lock").mkdir(exist_ok=True)  # killed during a transaction
        journal = Journal(tmp_path / "journal")
        with pytest.raises(JournalUnreadableError, match="locked"):
            journal.restore(0, {})
        journal.remove_stale_lock()
        found = journal.restore(0, {})
        assert list(found) == [str(index) for index in range(len(found))] != []
        assert journal.passed_over == []
        journal.start(0, found, {})
        reader = Journal(tmp_path / "journal")
        assert reader.rows() == journal.rows()
        journal.begin(5)
        journal.append(recorded(FIRST))
        journal.prune(5)
        assert [row.rollout_id for row in reader.rows()] == ["a"]

    child = in_child(write_until_killed)
    wait_until_begun(tmp_path)
    time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.waitpid(in_child(resume), 0)[1] == 0


def wait_until_begun(folder) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def in_child(act) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def test_kill_9_in_the_middle_of_a_commit_leaves_whole_turns(tmp_path):
    """At whatever moment: each turn is there, or not."""
    child = os.fork()
    if child == 0:
        journal = begun(tmp_path)
        turns = []
        for index in range(100_000):
            turns.append(turn((index,), range(2000)))
            journal.append(recorded(*turns))
            (tmp_path / "begun").touch()
    wait_until_begun(tmp_path)
    time.sleep(0.3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    journal = Journal(tmp_path / "journal")
    found = journal.restore(0, {})
    assert journal.passed_over == []
    assert [one.prompt_token_ids for one in found["a"].turns] == [
        (index,) for index in range(len(found["a"].turns))
    ]
    journal.start(0, found, {})
    journal.append(recorded(*found["a"].turns, FIRST))
    assert len(found_in(tmp_path)["a"].turns) == len(found["a"].turns) + 1


def test_a_run_that_is_killed_again_and_again_still_samples_each_turn_once(tmp_path):
    undisturbed = Run(Replaying).whole()
    killed_after(tmp_path, Replaying, 1)
    for killed in range(1, 3 * SIZE):
        found = found_in(tmp_path)
        assert sum(len(entry.turns) for entry in found.values()) == killed
        killed_after(tmp_path, Replaying, 1, usable_at(0, found))
    after = Run(Replaying)
    assert contents(after.whole(found_in(tmp_path).values())) == contents(undisturbed)
    assert after.generate.requests == []
    assert after.factory.made == []


# What a resumed run may use


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
