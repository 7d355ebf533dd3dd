"""The audit of simulated runs: of whole ones, and of ones that are damaged in one way each."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated_parts import Memory
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.commands import cli
from torchtitan_rl.config.run_lock import hold_run
from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.observability.rollout_log import RolloutLog
from torchtitan_rl.observability.sinks import MetricsLog
from torchtitan_rl.observability.step_metrics import (
    account_metrics,
    evaluation_metrics,
    step_metrics,
)
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import _line, read_lines
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.records import AccountRecord, EvaluationRecord, StepRecord
from torchtitan_rl.orchestration.recovery import choose_checkpoint
from torchtitan_rl.orchestration.saved_run import GROUPS
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    read_document,
    seal,
    temporary_path,
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
    chance=2,
)
IDENTITY = {
    "num_steps": 4,
    "schedule.staleness": 1,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 2,
    "checkpoint.export_hf": True,
}


class Files(Memory):
    """A recorder that writes what `RunRecorder` does, and ends the run at a step."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        super().__init__()
        self._metrics = MetricsLog(run_dir, tensorboard=False, resume_step=resume_step)
        self._rollouts = RolloutLog(
            run_dir / "rollouts.jsonl", per_step=4, seed=0, resume_step=resume_step
        )
        self.on_step: Callable[[int], None] = lambda step: None

    def record_step(self, record: StepRecord) -> None:
        super().record_step(record)
        metrics = step_metrics(replace(record, trainer={"loss": 0.5}))
        self._metrics.record(record.step, record.version, metrics)
        self._rollouts.record(record.step, record.version, record.groups, Split.TRAIN)
        self.on_step(record.step)

    def record_evaluation(self, record: EvaluationRecord) -> None:
        super().record_evaluation(record)
        self._metrics.record(record.step, record.version, evaluation_metrics(record))
        self._rollouts.record(record.step, record.version, record.groups, Split.EVALUATION)

    def record_account(self, record: AccountRecord) -> None:
        super().record_account(record)
        self._metrics.record(record.step, record.version, account_metrics(record))


class Killed(BaseException):
    """The process ends here."""


def live(
    run_dir: Path,
    plan: Plan,
    *,
    resume: bool = False,
    stop_at: int = 0,
    kill_at: int = 0,
    kill_after: float | None = None,
) -> Path:
    """One life of a run: to its end, to a stop after a step, or to a kill at a step or a moment.

    Returns where the files are at that moment: a kill after ``kill_after`` leaves a copy.
    """

    async def run() -> Path:
        found = None
        if resume:
            found = choose_checkpoint(
                CheckpointDirectory(run_dir / "checkpoints"), JournalDirectory(run_dir / "journal")
            )
            assert found.passed_over == ()
        recorder = Files(run_dir, found.step if found is not None else None)
        simulation = Simulation(plan, run_dir, recorder=recorder)
        task = asyncio.create_task(simulation.controller.run(resume_from=found))

        def on_step(step: int) -> None:
            if step == stop_at:
                simulation.controller.request_stop()
            if step == kill_at:
                raise Killed

        recorder.on_step = on_step
        await asyncio.wait({task}, timeout=kill_after)
        if not task.done():
            left = run_dir.with_name(f"{run_dir.name}-killed")
            shutil.copytree(run_dir, left)
            task.cancel()
            await asyncio.wait({task})
            return left
        task.result()
        policy = run_dir / "policy"
        policy.mkdir()
        (policy / "config.json").write_text("{}")
        (policy / "model.safetensors").touch()
        return run_dir

    try:
        left: Path = run_virtually(run())
    except StopRequested:
        assert stop_at
        return run_dir
    except Killed:
        return run_dir
    assert not stop_at
    assert not kill_at
    return left


def begun(run_dir: Path) -> Path:
    (run_dir / "identity.json").write_text(json.dumps(IDENTITY))
    return run_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = begun(tmp_path_factory.mktemp("whole"))
    live(run_dir, PLAN)
    return run_dir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = begun(tmp_path_factory.mktemp("stopped"))
    live(run_dir, PLAN, stop_at=3)
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
        "journal step-000002.jsonl: ok",
        "rollouts: tokens: ok",
        "end of the run: ok (1 finished runs)",
    ):
        assert line in out


def test_a_run_that_was_stopped_and_one_that_was_killed_and_both_resumed_add_up(
    tmp_path: Path, audited: Audited
) -> None:
    begun(tmp_path)
    live(tmp_path, PLAN, stop_at=1)
    assert audited(tmp_path)[0] == 0
    live(tmp_path, PLAN, resume=True, kill_at=3)
    assert audited(tmp_path)[::2] == (0, "")
    live(tmp_path, PLAN, resume=True)
    assert audited(tmp_path)[::2] == (0, "")


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness": 0, "window": 0.5},
        {"zero_variance": "resample", "reward_levels": 2},
        {"zero_variance": "skip", "reward_levels": 2},
        {"env_fails": 0.2},
    ],
)
@pytest.mark.parametrize("chance", range(3))
def test_runs_of_all_kinds_add_up(
    tmp_path: Path, audited: Audited, changes: dict[str, Any], chance: int
) -> None:
    plan = Plan(**{**vars(PLAN), **changes, "chance": chance})
    identity = IDENTITY | {"schedule.staleness": plan.staleness}
    (tmp_path / "identity.json").write_text(json.dumps(identity))
    live(tmp_path, plan, stop_at=2)
    assert audited(tmp_path)[::2] == (0, "")
    live(tmp_path, plan, resume=True)
    assert audited(tmp_path)[::2] == (0, "")


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_killed_at_any_moments_adds_up_after_each_and_in_the_end(
    tmp_path: Path, audited: Audited, seed: int
) -> None:
    chance = random.Random(seed)
    changes = {
        "staleness": seed % 3,
        "checkpoint_every": chance.choice([0, 1, 2]),
        "zero_variance": chance.choice(["train", "resample"]),
        "reward_levels": 2,
        "env_fails": 0.1,
        "chance": seed,
    }
    plan = Plan(**{**vars(PLAN), **changes})
    run_dir = tmp_path / "0"
    run_dir.mkdir()
    identity = IDENTITY | {"schedule.staleness": plan.staleness}
    (run_dir / "identity.json").write_text(json.dumps(identity))
    for _ in range(4):
        left = live(run_dir, plan, resume=True, kill_after=chance.uniform(1.0, 40.0))
        if left == run_dir:
            break
        run_dir = left
        assert audited(run_dir)[0] in (0, 2)  # 2: before anything was written
    else:
        live(run_dir, plan, resume=True)
    code, out, err = audited(run_dir)
    assert (code, err) == (0, "")
    assert "metrics: steps: ok (4 steps)" in out


def assert_found(violation: str, result: tuple[int, str, str]) -> None:
    code, _, err = result
    assert code == 1
    assert violation in err


def copied(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-r", f"{source}/.", target], check=True)
    return target


def change_rows(run_dir: Path, name: str, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = run_dir / name
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row_of(rows: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(row for row in rows if row["step"] == step and "time/step_s" in row)


def set_metric(step: int, **fields: float) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        for name, value in fields.items():
            row_of(rows, step)[name.replace("__", "/")] = value

    return change


def add(step: int, name: str, number: int) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        row_of(rows, step)[name] += number

    return change


def without_step_2(rows: list[dict[str, Any]]) -> None:
    rows.remove(row_of(rows, 2))


def step_2_twice(rows: list[dict[str, Any]]) -> None:
    rows.insert(rows.index(row_of(rows, 2)), dict(row_of(rows, 2)))


def validated_twice(rows: list[dict[str, Any]]) -> None:
    one = next(row for row in rows if "evaluation/reward_mean" in row)
    rows.insert(1, {key: value for key, value in one.items() if not key.startswith("time/step")})


def less_trained(rows: list[dict[str, Any]]) -> None:
    """It adds up in its row, and falls."""
    row, before = row_of(rows, 3), row_of(rows, 2)
    lost = row["total/tokens_trained"] - before["total/tokens_trained"] + 1
    row["total/tokens_trained"] -= lost
    row["total/tokens_buffered"] += lost


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_step_2, "step 3 comes after step 1"),
        (step_2_twice, "step 2 comes after step 2"),
        (set_metric(3, version=1), "version 1 comes after version 2"),
        (set_metric(3, version=4), "version 4"),
        (add(2, "total/tokens_generated", 1), "tokens generated, but"),
        (add(2, "total/groups_admitted", 1), "groups admitted, but"),
        (add(2, "tokens/generated", 1), "of which"),
        (add(2, "train/groups", 1), "a batch of 3"),
        (add(2, "train/rollouts", 1), "5.0 rollouts of 2.0 groups of 2"),
        (set_metric(2, policy__staleness_max=2.0), "tokens 2.0 versions old"),
        (set_metric(2, account__unaccounted_tokens=3), "3 tokens were sampled and are in no"),
        (add(2, "buffer/finished", 100), "groups in a buffer of"),
        (less_trained, "tokens_trained falls from"),
        (validated_twice, "step 0 is validated again"),
        (lambda rows: rows.append({"step": "x"}), "no step, or no version"),
    ],
)
def test_a_fault_in_the_metrics_is_found(
    whole: Path, tmp_path: Path, audited: Audited, change: Any, said: str
) -> None:
    change_rows(copied(whole, tmp_path), "metrics.jsonl", change)
    assert_found(said, audited(tmp_path))


def longer(rows: list[dict[str, Any]]) -> None:
    rows[-1]["turns"][0]["logprobs"].append(0.0)


def changed_row(**fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["split"] == "train")
        row.update(fields)

    return change


def versions(split: str, version: int) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        row = [row for row in rows if row["split"] == split][-1]
        turn = row["turns"][0]
        turn["versions"] = [version] * len(turn["token_ids"])

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.append(dict(rows[-1])), "is there twice"),
        (longer, "logprobs and"),
        (changed_row(reward=None), "status completed with reward None"),
        (changed_row(status="env_error"), "status env_error with reward"),
        (changed_row(status="exploded"), "status exploded"),
        (changed_row(step=99), "step 99 is in no row of the metrics"),
        (versions("train", 0), "schedule.staleness is 1"),
        (versions("train", 77), "tokens of version 77"),
        (versions("evaluation", 1), "not 4 alone"),
    ],
)
def test_a_fault_in_the_rollouts_is_found(
    whole: Path, tmp_path: Path, audited: Audited, change: Any, said: str
) -> None:
    change_rows(copied(whole, tmp_path), "rollouts.jsonl", change)
    assert_found(said, audited(tmp_path))


def changed_document(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = read_document(path)
    change(document)
    seal(path, document)


def document(**fields: Any) -> Callable[[Path], None]:
    return lambda path: changed_document(path, lambda found: found.update(fields))


def ledger(**numbers: int) -> Callable[[Path], None]:
    def change(found: dict[str, Any]) -> None:
        for name, number in numbers.items():
            found["ledger"][name] += number

    return lambda path: changed_document(path, change)


def groups(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "attachments" / GROUPS
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        change(rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changed_document(path, lambda found: None)

    return damage


def recorded(rows: list[dict[str, Any]]) -> Any:
    return next(one for row in rows for one in row["rollouts"] if one["turns"])


def of_another_turn(rows: list[dict[str, Any]]) -> None:
    recorded(rows)["turns"][0]["completion"]["request_id"] = "e9/p9/r0/t0"


def of_a_later_version(rows: list[dict[str, Any]]) -> None:
    recorded(rows)["turns"][0]["completion"]["version_runs"] = [[0, 9]]


def without_logprobs(rows: list[dict[str, Any]]) -> None:
    recorded(rows)["turns"][0]["completion"]["logprobs"] = [0.5]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (document(step=7), "the document is of step 7"),
        (document(version=2), "version 2; 3 in the row of step 3"),
        (ledger(groups_admitted=90), "groups admitted, but"),
        (ledger(groups_admitted=1, groups_trained=1), "groups trained in 3 steps of"),
        (ledger(generated=1), "LedgerError"),
        (groups(lambda rows: rows.append(rows[0])), "groups that are there twice"),
        (groups(lambda rows: rows.pop()), "in the ledger or in the buffer only"),
        (groups(lambda rows: rows[0].update(admitted_version=0)), "was admitted at version 0"),
        (groups(lambda rows: rows[0].update(admitted_version=9)), "was admitted at version 9"),
        (groups(of_another_turn), "turn 0 is request e9/p9/r0/t0"),
        (groups(of_a_later_version), "tokens of versions [9]"),
        (groups(without_logprobs), "1 logprobs"),
        (lambda path: (path / MARKER).unlink(), "is not complete"),
        (lambda path: (path / "weights.json").write_text("[0, 99999]"), "weights.json"),
    ],
)
def test_a_fault_in_a_checkpoint_is_found(
    stopped: Path, tmp_path: Path, audited: Audited, damage: Any, said: str
) -> None:
    run_dir = copied(stopped, tmp_path)
    damage(run_dir / "checkpoints" / "step-000003")
    assert_found(said, audited(run_dir))


def test_a_checkpoint_without_the_rows_before_it_is_found(
    stopped: Path, tmp_path: Path, audited: Audited
) -> None:
    run_dir = copied(stopped, tmp_path)
    change_rows(run_dir, "metrics.jsonl", lambda rows: rows.remove(row_of(rows, 3)))
    assert_found("there is no row of step 3", audited(run_dir))


def a_turn(**fields: Any) -> dict[str, Any]:
    completion = {"version_runs": [[0, 0]], "token_ids": "AQAAAA=="}
    turn = {"completion": completion}
    return {"rollout_id": "e0/p0/r0", "index": 0, "turn": turn, "env_state": None} | fields


def of_version(version: int) -> dict[str, Any]:
    return {"completion": {"version_runs": [[0, version]], "token_ids": "AQAAAA=="}}


def journal(*rows: Mapping[str, Any], **header: Any) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        path = run_dir / "journal" / "step-000003.jsonl"
        found = list(read_lines(path))
        found[0] |= header
        path.write_bytes(b"".join(_line(row) for row in [*found, *rows]))

    return damage


def finished_group(run_dir: Path) -> None:
    file = run_dir / "checkpoints" / "step-000003" / "attachments" / GROUPS
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    name = next(row["group_id"] for row in rows if row["group"] is not None)
    journal(a_turn(rollout_id=f"{name}/r0"))(run_dir)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (finished_group, "which its checkpoint holds as finished"),
        (journal(a_turn(turn=of_version(9))), "tokens of a version after 3"),
        (journal(version=1), "begun at version 1; its checkpoint has version 3"),
        (journal(a_turn(rollout_id="e7/p7/r0"), a_turn(rollout_id="e7/p7/r0", index=2)), "turn 2"),
        (
            lambda run_dir: (run_dir / "journal" / "step-000003.jsonl").write_bytes(b"0 {}\n1\n"),
            "damaged",
        ),
    ],
)
def test_a_fault_in_a_journal_is_found(
    stopped: Path, tmp_path: Path, audited: Audited, damage: Any, said: str
) -> None:
    run_dir = copied(stopped, tmp_path)
    damage(run_dir)
    assert_found(said, audited(run_dir))


def test_a_finished_run_without_its_policy_is_found(
    whole: Path, tmp_path: Path, audited: Audited
) -> None:
    run_dir = copied(whole, tmp_path)
    (run_dir / "policy" / "model.safetensors").unlink()
    assert_found("holds no policy: resume the run to export it", audited(run_dir))


def test_what_a_killed_writer_left_is_no_checkpoint_and_no_fault(
    whole: Path, tmp_path: Path, audited: Audited
) -> None:
    run_dir = copied(whole, tmp_path)
    temporary_path(run_dir / "checkpoints" / "step-000009").mkdir()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step":5,"ver')
    assert audited(run_dir)[0] == 0


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


def test_an_audit_imports_no_framework() -> None:
    code = (
        "import sys, torchtitan_rl.audit.command; "
        "assert not {'torch', 'vllm', 'monarch', 'torchtitan'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_is_going_on_is_not_audited(
    stopped: Path, tmp_path: Path, audited: Audited
) -> None:
    run_dir = copied(stopped, tmp_path)
    with hold_run(run_dir):
        code, _, err = audited(run_dir)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: a run is audited when it has ended: name is ")
    assert audited(run_dir)[0] == 0
