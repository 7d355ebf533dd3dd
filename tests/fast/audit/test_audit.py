"""The audit of simulated runs: of whole ones, and of ones that are damaged in one way each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.simulation import Plan, Simulation, run_config
from tests.support.turns import turn
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.audit.run import audit
from torchtitan_rl.commands import cli
from torchtitan_rl.config.plan import ProcessPlan
from torchtitan_rl.config.resume import (
    MANIFEST,
    read_run_identity,
    run_identity,
    write_identity,
    write_manifest,
)
from torchtitan_rl.config.run import MetricsConfig
from torchtitan_rl.launch.lease import hold_run
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.checkpointing import (
    GROUPS,
    POSITION,
    choose_checkpoint,
    read_saved_run,
)
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.orchestration.records import StepRecord
from torchtitan_rl.rollout.records import RecordedRollout
from torchtitan_rl.training.checkpoint_files import (
    seal,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory

PLAN = Plan(
    num_steps=4,
    groups_per_step=2,
    staleness=1,
    turns=2,
    replicas=3,
    checkpoint_every=2,
    validate_every=2,
    evaluation_problems=3,
    reserves=True,
    train_s=1.0,
    chance=4,
)
POLICY = Path(__file__).parents[3] / "experiments" / "alphabet_sort" / "policy"
Row = dict[str, Any]
Damage = Callable[[Path], None]


class Killed(BaseException):
    """The process ends here."""


class Recorder(RunRecorder):
    """Ends the run at a step."""

    on_step: Callable[[int], None]

    def record_step(self, record: StepRecord) -> None:
        super().record_step(replace(record, trainer={"loss": 0.5}))
        self.on_step(record.step)


def live(
    run_dir: Path,
    plan: Plan,
    *,
    resume: bool = False,
    stop_at: int = 0,
    kill_at: int = 0,
    logged: int = 3,
) -> Path:
    """One life of a run: to its end, or to a stop or a kill at a step; returns its folder."""
    config = replace(
        run_config(plan),
        output_dir=run_dir.parent,
        name=run_dir.name,
        metrics=MetricsConfig(trackers=(), trace=False, progress="none", rollouts_per_step=logged),
    )
    (run_dir / MANIFEST).unlink(missing_ok=True)
    write_identity(run_dir, run_identity(config, POLICY))

    async def run() -> None:
        found = None
        if resume:
            found = choose_checkpoint(
                CheckpointDirectory(run_dir / "checkpoints"), Journal(run_dir / JOURNAL)
            )
            assert found.passed_over == ()
        processes = ProcessPlan(device="cpu", replicas=())
        step = found.step if found is not None else None
        recorder = Recorder(config, processes, resume_step=step)
        simulation = Simulation(plan, run_dir, recorder=recorder)

        def on_step(step: int) -> None:
            if step == stop_at:
                simulation.controller.request_stop()
            if step == kill_at:
                raise Killed

        recorder.on_step = on_step
        await simulation.controller.run(resume_from=found)
        policy = run_dir / "policy"
        policy.mkdir()
        (policy / "config.json").write_text('{"vocab_size": 32}')
        (policy / "model.safetensors").write_bytes(bytes(range(256)))

    ended: set[type[BaseException]] = {Killed} if kill_at else {StopRequested} if stop_at else set()
    with pytest.raises(tuple(ended)) if ended else nullcontext():
        run_virtually(run())
    if not kill_at:
        write_manifest(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return live(tmp_path_factory.mktemp("whole"), PLAN)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the list of its files, so that each check has to find faults by itself."""
    run_dir = live(tmp_path_factory.mktemp("stopped"), PLAN, stop_at=3)
    (run_dir / MANIFEST).unlink(missing_ok=True)
    return run_dir


Audited = Callable[[Path], tuple[int, str, str]]


@pytest.fixture
def audited(capsys: pytest.CaptureFixture[str]) -> Audited:
    """Runs the command; returns its exit code, stdout and stderr."""

    def audited(run_dir: Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["audit", str(run_dir)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return audited


def test_a_whole_run_adds_up_with_a_line_for_each_check(whole: Path, audited: Audited) -> None:
    code, out, err = audited(whole)
    assert (code, err) == (0, "")
    for line in (
        "metrics: steps: ok (4 steps)",
        "metrics: totals: ok (4 rows with totals)",
        "metrics: growth of totals: ok (4 pairs of rows)",
        "metrics: ages: ok (4 rows with ages)",
        "metrics: evaluations: ok (3 evaluations)",
        "checkpoints: whole: ok (2 checkpoints)",
        "checkpoint 2: account: ok",
        "checkpoint 4: against its row of the metrics: ok (1 rows)",
        "journal: ok (",
        "rollouts: tokens: ok",
        "rollouts: as they were written: ok (7 steps and evaluations)",
        "manifest.json: files as they were left: ok (",
        "end of the run: ok (1 finished runs)",
    ):
        assert line in out


def test_a_finished_run_with_adapters_has_exported_them(
    whole: Path, tmp_path: Path, audited: Audited
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / MANIFEST).unlink(missing_ok=True)
    identity = read_run_identity(run_dir)
    assert identity is not None
    write_identity(run_dir, identity | {"policy.lora.rank": 8})
    write_manifest(run_dir)
    code, _, err = audited(run_dir)
    assert code == 1
    assert f"{run_dir / 'adapter'} holds no adapter: remove {run_dir / 'policy'}" in err
    (run_dir / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run_dir / "adapter" / name).write_bytes(b"{}")
    code, _, err = audited(run_dir)
    assert code == 1
    assert "adapter/adapter_config.json was added after the end: remove it" in err
    write_manifest(run_dir)
    assert audited(run_dir)[0] == 0


def test_a_finished_run_that_was_given_more_steps_and_killed_adds_up(
    tmp_path: Path, audited: Audited
) -> None:
    """Its newest checkpoint is of the last step that it was to take before."""
    live(tmp_path, PLAN)
    newest = tmp_path / "checkpoints" / "step-000004"
    identity = json.loads((tmp_path / "identity.json").read_text())
    position(lambda found: found.update(identity=identity), newest)(tmp_path)
    more = replace(PLAN, num_steps=8, checkpoint_every=0)
    live(tmp_path, more, resume=True, kill_at=6)
    assert audited(tmp_path)[::2] == (0, "")


def lines(name: str, change: Callable[[list[Row]], object]) -> Damage:
    """``change`` of the rows of a file."""

    def damage(run_dir: Path) -> None:
        rows = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        change(rows)
        (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return damage


def metrics(step: int, **changed: float) -> Damage:
    """New values in the row of a step; ``__`` stands for the slash."""
    names = {name.replace("__", "/"): value for name, value in changed.items()}
    return lines("metrics.jsonl", lambda rows: row_of(rows, step).update(names))


def one_more(step: int, name: str, number: int = 1) -> Damage:
    def change(rows: list[Row]) -> None:
        row_of(rows, step)[name] += number

    return lines("metrics.jsonl", change)


def row_of(rows: list[Row], step: int) -> Row:
    return next(row for row in rows if row["step"] == step and "time/step_s" in row)


def step_2_twice(rows: list[Row]) -> None:
    rows.insert(rows.index(row_of(rows, 2)), dict(row_of(rows, 2)))


def less_trained(rows: list[Row]) -> None:
    """It adds up in its row, and falls."""
    row, before = row_of(rows, 3), row_of(rows, 2)
    lost = row["total/tokens_trained"] - before["total/tokens_trained"] + 1
    row["total/tokens_trained"] -= lost
    row["total/tokens_buffered"] += lost


def rollouts(change: Callable[[list[Row]], object]) -> Damage:
    return lines("rollouts.jsonl", change)


def rollout(split: str, **fields: Any) -> Damage:
    """New values in the last rollout of a split."""
    return rollouts(lambda rows: [r for r in rows if r["split"] == split][-1].update(fields))


def versions(split: str, version: int) -> Damage:
    def change(rows: list[Row]) -> None:
        turn = [row for row in rows if row["split"] == split][-1]["turns"][0]
        turn["versions"] = [version] * len(turn["token_ids"])

    return rollouts(change)


CHECKPOINT = "checkpoints/step-000003"


def attachment(name: str, change: Callable[[Any], object], checkpoint: Path) -> Damage:
    """``change`` of an attachment of a checkpoint, which is sealed again."""

    def damage(run_dir: Path) -> None:
        path = run_dir / checkpoint / "attachments" / name
        found = msgspec.msgpack.decode(path.read_bytes())
        change(found)
        path.write_bytes(msgspec.msgpack.encode(found))
        seal(run_dir / checkpoint, {})

    return damage


def position(change: Callable[[Row], object], checkpoint: Path = Path(CHECKPOINT)) -> Damage:
    return attachment(POSITION, change, checkpoint)


def groups(change: Callable[[list[Row]], object]) -> Damage:
    """``change`` of the entries of the work buffer."""
    return attachment(GROUPS, lambda found: change(found[0]), Path(CHECKPOINT))


def completion(**fields: Any) -> Damage:
    """New values in a completion of an unfinished rollout."""

    def change(found: list[list[Row]]) -> None:
        rollout = next(one for one, _ in found[1] if one["turns"])
        rollout["turns"][0]["completion"].update(fields)

    return attachment(GROUPS, change, Path(CHECKPOINT))


def ledger(**numbers: int) -> Damage:
    """So many more in the counts of a checkpoint's ledger."""

    def change(found: Row) -> None:
        for name, number in numbers.items():
            found["ledger"][name] += number

    return position(change)


def journal(rollout_id: str = "e0/p0/r0", version: int = 0) -> Damage:
    """One more turn."""

    def damage(run_dir: Path) -> None:
        saved = read_saved_run(run_dir / CHECKPOINT)
        journal = Journal(run_dir / JOURNAL)
        step, mark = saved.position.step, saved.position.journal_mark
        journal.start(step, journal.restore(step, {}, mark=mark), {}, mark=mark)
        one = turn((1,), (1,), versions=[version])
        journal.append(RecordedRollout(rollout_id=rollout_id, turns=(one,)))
        journal.close()

    return damage


def a_turn_of_a_finished_group(run_dir: Path) -> None:
    entries = read_saved_run(run_dir / CHECKPOINT).entries
    name = next(entry.group_id for entry in entries if entry.group is not None)
    journal(f"{name}/r0")(run_dir)


ONE_BYTE = {"data": b"\0", "num_layers": 1, "per_token": 2}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lines("metrics.jsonl", lambda rows: rows.remove(row_of(rows, 2))), "comes after step 1"),
        (lines("metrics.jsonl", step_2_twice), "step 2 comes after step 2"),
        (metrics(2, policy__staleness_max=2.0), "tokens 2.0 versions old"),
        (one_more(2, "buffer/finished", 100), "groups in a buffer of"),
        (lines("metrics.jsonl", less_trained), "tokens_trained falls from"),
        (lines("metrics.jsonl", lambda rows: rows.insert(1, rows[0])), "step 0 is validated again"),
        (lines("metrics.jsonl", lambda rows: rows.append({"step": "x"})), "no step, or no version"),
        (lines("metrics.jsonl", lambda rows: rows.remove(row_of(rows, 3))), "no row of step 3"),
        (rollouts(lambda rows: rows.append(dict(rows[-1]))), "is there twice"),
        (rollouts(lambda rows: rows[-1]["turns"][0]["logprobs"].append(0.0)), "logprobs and"),
        (rollout("train", reward=None), "status completed with reward None"),
        (rollout("train", status="exploded"), "status exploded"),
        (rollout("train", step=99), "step 99 is in no row of the metrics"),
        (versions("train", 0), "schedule.staleness is 1"),
        (versions("train", 77), "tokens of version 77"),
        (versions("evaluation", 1), "not 2 alone"),
        (ledger(groups_admitted=1, groups_trained=1), "groups trained in 3 steps of"),
        (groups(lambda rows: rows.append(rows[0])), "groups that are there twice"),
        (groups(lambda rows: rows.pop()), "in the ledger or in the buffer only"),
        (groups(lambda rows: rows[0].update(admitted_version=0)), "was admitted at version 0"),
        (completion(request_id="e9/p9/r0/t0"), "turn 0 is request e9/p9/r0/t0"),
        (completion(version_runs=[[0, 9]]), "tokens of versions [9]"),
        (completion(logprobs=[0.5]), "1 logprobs"),
        (completion(routed_experts=ONE_BYTE), "routed experts have 1 bytes, for 1 layers of 2"),
        (a_turn_of_a_finished_group, "holds its group as finished"),
        (journal(version=9), "tokens of a version after 3"),
        (metrics(2, buffer__batched=10**400), "too large"),
        (lambda run_dir: (run_dir / JOURNAL).write_bytes(b"0 {}\n1\n"), "not a database"),
    ],
)
def test_a_fault_is_found(
    stopped: Path, tmp_path: Path, audited: Audited, damage: Damage, said: str
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    code, _, err = audited(tmp_path)
    assert code == 1
    assert said in err


def violations(run_dir: Path) -> list[str]:
    return [violation for check in audit(run_dir) for violation in check.violations]


COUNTED = re.compile(
    r"step|version|total/.+|tokens/(generated|trained|discarded)|train/(groups|rollouts)|"
    r"account/unaccounted_tokens"
)


@pytest.mark.parametrize("number", [-1, 1])
def test_every_number_of_the_account_is_checked(stopped: Path, tmp_path: Path, number: int) -> None:
    """Each is off by one, alone."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    unnoticed = []
    for row in rows[1:]:
        for name in filter(COUNTED.fullmatch, list(row)):
            row[name] += number
            file.write_text("".join(json.dumps(one) + "\n" for one in rows))
            row[name] -= number
            if not violations(tmp_path):
                unnoticed.append((row["step"], name))
    assert unnoticed == []


@pytest.mark.parametrize("number", [-1, 1])
def test_every_number_in_the_position_of_a_checkpoint_is_checked(
    stopped: Path, tmp_path: Path, number: int
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    file = tmp_path / CHECKPOINT / "attachments" / POSITION
    sound = msgspec.msgpack.decode(file.read_bytes())
    unnoticed = []
    for part in (sound, sound["ledger"], sound["ledger"]["tokens_of"]):
        for name in [name for name, value in part.items() if isinstance(value, int)]:
            part[name] += number
            file.write_bytes(msgspec.msgpack.encode(sound))
            seal(tmp_path / CHECKPOINT, {})
            part[name] -= number
            if not violations(tmp_path):
                unnoticed.append(name)
    assert unnoticed == ["journal_mark"]  # a place in a file


def test_every_file_that_is_missing_is_found(stopped: Path, tmp_path: Path) -> None:
    unnoticed = []
    for file in [str(path.relative_to(stopped)) for path in stopped.rglob("*") if path.is_file()]:
        run_dir = tmp_path / file.replace("/", "-")
        shutil.copytree(stopped, run_dir)
        (run_dir / file).unlink()
        if not violations(run_dir):
            unnoticed.append(file)
    assert unnoticed == ["identity.json"]  # the checkpoints have it, too


def test_a_folder_that_is_no_run_is_told_apart_from_one_with_faults(
    tmp_path: Path, audited: Audited
) -> None:
    assert audited(tmp_path) == (
        2,
        "",
        f"error: {tmp_path}: no run (neither metrics.jsonl nor checkpoints)\n",
    )
    assert cli.main(["audit"]) == 2
    assert cli.main(["audit", "--help"]) == 0
    assert cli.main(["audit", "a", "b"]) == 2


def test_a_run_that_is_going_on_is_audited_as_far_as_it_is(
    whole: Path, tmp_path: Path, audited: Audited
) -> None:
    run_dir = tmp_path
    shutil.copytree(whole, run_dir, dirs_exist_ok=True)
    with hold_run(run_dir):
        (run_dir / MANIFEST).unlink(missing_ok=True)
        assert audited(run_dir)[::2] == (0, "")
    assert "there is no manifest.json" in audited(run_dir)[2]


def change_file(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    """``change`` of the lines of a file."""

    def damage(file: Path) -> None:
        file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))

    return damage


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_a_number(found: list[bytes]) -> list[bytes]:
    """The first digit of the line in the middle that has one."""
    at = [number for number, line in enumerate(found) if re.search(rb"\d", line)]
    if at:
        middle = at[len(at) // 2]
        found[middle] = re.sub(rb"\d", lambda m: b"%d" % (9 - int(m[0])), found[middle], count=1)
    return found


def without_a_token(found: list[bytes]) -> list[bytes]:
    """Of a rollout, from all that is aligned with it."""
    row = json.loads(found[-1])
    for name in ("token_ids", "logprobs", "versions", "loss_mask"):
        row["turns"][0].get(name, [0]).pop()
    return [*found[:-1], json.dumps(row, separators=(",", ":")).encode() + b"\n"]


TAMPERINGS: dict[str, Callable[[Path], None]] = {
    "nested": lambda path: path.write_text(200_000 * "["),
    "removed": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-2]) and None,
    "a bit": flip,
    "first line": change_file(lambda found: found[1:]),
    "last line": change_file(lambda found: found[:-1]),
    "two lines": change_file(lambda found: found[:-2] + found[-2:][::-1]),
    "a number": change_file(change_a_number),
}


def test_every_file_of_a_finished_run_is_protected(whole: Path, tmp_path: Path) -> None:
    files = [str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()]
    cases = [(file, what, damage) for file in files for what, damage in TAMPERINGS.items()]
    cases.append(("rollouts.jsonl", "a token", change_file(without_a_token)))
    unnoticed = []
    for file, what, damage in cases:
        run_dir = tmp_path / what
        shutil.copytree(whole, run_dir)
        damage(run_dir / file)
        is_changed = (
            what == "removed" or (whole / file).read_bytes() != (run_dir / file).read_bytes()
        )
        name, folder = Path(file).name, Path(file).parent.name
        named = [line for line in violations(run_dir) if name in line or f"{folder} " in line]
        if is_changed and not any(re.search("restore|resume", line) for line in named):
            unnoticed.append((file, what, named))
        shutil.rmtree(run_dir)
    assert unnoticed == []


@pytest.mark.parametrize(
    ("there", "copy"),
    [
        ("policy/config.json", "policy/model.safetensors.index.json"),
        ("checkpoints/step-000004", "checkpoints/step-000003"),
        ("metrics.jsonl", "metrics.000001.jsonl"),
        ("rollouts.jsonl", "rollouts.000001.jsonl"),
    ],
)
def test_a_file_that_was_added_to_a_finished_run_is_found(
    whole: Path, tmp_path: Path, there: str, copy: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    subprocess.run(["cp", "-r", tmp_path / there, tmp_path / copy], check=True)
    added = [line for line in violations(tmp_path) if "was added after the end: remove it" in line]
    assert any(line.startswith(copy) for line in added)


@pytest.mark.parametrize("change", [without_a_token, lambda found: found[:-1], change_a_number])
def test_a_changed_rollout_of_a_killed_run_is_found(
    stopped: Path, tmp_path: Path, audited: Audited, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    change_file(change)(tmp_path / "rollouts.jsonl")
    assert "are not those that were written" in audited(tmp_path)[2]
