from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_files import files_of_at_most
from tests.support.config_mutations import with_value
from torchtitan_rl.commands.cli import main
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import PreparedRun, claim_run, prepare_run
from torchtitan_rl.config.resume import (
    is_complete,
    resume_changes,
    resume_errors,
    run_identity,
    write_manifest,
)
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.mcp import McpServer, McpTask
from torchtitan_rl.environments.mixture import MixtureTask
from torchtitan_rl.environments.open_env import OpenEnvTask
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.orchestration.checkpointing import POSITION, RunPosition
from torchtitan_rl.rollout.records import to_bytes
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.training.checkpoint_files import seal, write_attachments

TINY_FILE = str(Path(__file__).parents[3] / "configs" / "alphabet_sort_tiny.py")
POLICY = Path(TINY.policy.checkpoint)
MACHINE = HostFacts(num_cores=16, memory_bytes=64 << 30)
MUST_STAY = {
    "seed": 1,
    "rollout.groups_per_step": 8,
    "rollout.group_size": 4,
    "rollout.max_turns": 2,
    "rollout.max_total_tokens": 200,
    "rollout.sampling.temperature": 0.9,
    "rollout.sampling.max_tokens_per_turn": 30,
    "rollout.advantage": "std",
    "schedule.staleness": 1,
    "schedule.max_overtaking_share": 0.5,
    "schedule.zero_variance": "skip",
    "trainer.optimizer.betas": (0.9, 0.99),
    "trainer.optimizer.weight_decay": 0.1,
    "task.max_turns": 2,
    "task.renderer": "auto",
    "endpoint.tool_call_parser": "hermes",
}
MAY_CHANGE = {
    "num_steps": 200,
    "generator.replicas": 3,
    "rollout.rollout_timeout_s": 7000.0,
    "schedule.max_wait_s": 20000.0,
    "trainer.data_parallel_shard": 2,
    "trainer.max_episode_tokens": 512,
    "trainer.loss.clip_high": 0.2,
    "trainer.optimizer.learning_rate": 1e-4,
    "evaluation.num_problems": 16,
    "checkpoint.every": 5,
    "metrics.trace": False,
    "placement": "colocated",
}


def identity(config: RunConfig, policy: Path = POLICY) -> dict[str, Any]:
    return run_identity(config, policy)


@pytest.mark.parametrize(("field", "value"), MUST_STAY.items())
def test_what_shapes_the_data_must_be_the_same(field: str, value: object) -> None:
    before, now = identity(TINY), identity(with_value(TINY, field, value))
    (error,) = resume_errors(before, now)
    assert error.startswith(f"{field} is ")
    assert "the run to be resumed has" in error
    assert resume_changes(before, now) == []


@pytest.mark.parametrize(("field", "value"), MAY_CHANGE.items())
def test_what_may_change_is_said(field: str, value: object) -> None:
    before, now = identity(TINY), identity(with_value(TINY, field, value))
    assert resume_errors(before, now) == []
    (change,) = resume_changes(before, now)
    assert change == f"{field}: {before[field]} -> {now[field]}"


def test_a_run_may_move_and_its_policy_too(tmp_path: Path) -> None:
    moved = dataclasses.replace(TINY, name="other", output_dir=tmp_path)
    shutil.copytree(POLICY, tmp_path / "policy")
    assert identity(moved, tmp_path / "policy") == identity(TINY)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_another_policy_is_one_error(name: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(POLICY, policy)
    content = (policy / name).read_bytes()
    (policy / name).write_bytes(
        content.replace(b'"hidden_size": 192', b'"hidden_size": 193') + b" "
    )
    (error,) = resume_errors(identity(TINY), identity(TINY, policy))
    assert error.startswith("policy.checkpoint holds another model")


def test_fields_of_another_version_of_the_program_are_passed_over() -> None:
    older = identity(TINY)
    del older["rollout.advantage"]
    older["rollout.forgotten"] = 3
    assert resume_errors(older, identity(TINY)) == []


def square(value: float) -> float:
    return value * value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(MixtureTask):
    measures: tuple[Any, ...] = (square,)


def mixed(**parts: Task) -> RunConfig:
    return dataclasses.replace(TINY, task=Measured(tasks=dict(parts)))


def test_parts_of_a_mixture_are_compared_by_their_fields() -> None:
    one = DataTask(train=("a.jsonl",))
    before = identity(mixed(a=one, b=one))
    (error,) = resume_errors(
        before, identity(mixed(a=dataclasses.replace(one, prompt="{x}"), b=one))
    )
    assert error.startswith("task.tasks.a.prompt is {x}: the run to be resumed has {")
    (error,) = resume_errors(before, identity(mixed(a=one)))
    assert error.startswith("task.tasks (types) is ['a: DataTask']: ")
    (error,) = resume_errors(identity(mixed()), before)
    assert error.startswith("task.tasks (types) is ['a: DataTask', 'b: DataTask']: ")
    older = {name: value for name, value in before.items() if name != "task.tasks.a.prompt"}
    assert resume_errors(older, identity(mixed(a=one, b=one))) == []


def test_of_what_only_says_where_something_is_the_contents_are_compared(tmp_path: Path) -> None:
    def of_files(folder: str, name: str, text: str) -> dict[str, Any]:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return identity(mixed(a=DataTask(train=(str(path),))))

    before = of_files("one", "a.jsonl", "{}\n")
    assert resume_errors(before, of_files("two", "a.jsonl", "{}\n")) == []
    for other in (of_files("one", "b.jsonl", "{}\n"), of_files("one", "a.jsonl", "[]\n")):
        (error,) = resume_errors(before, other)
        assert error.startswith("task.tasks.a.train (contents) is [")

    def of_servers(port: int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}"
        tools = McpTask(train=(), servers={"s": McpServer(url=url, tools=("add",))})
        return identity(mixed(a=OpenEnvTask(url=url), b=tools))

    assert resume_errors(of_servers(1), of_servers(2)) == []
    assert of_servers(1)["task.tasks.b.servers.s.tools"] == ["add"]


def test_a_weight_of_1_is_as_none() -> None:
    task = MixtureTask(tasks={"a": Task(), "b": Task()}, weights={"a": 2.0})
    before = identity(dataclasses.replace(TINY, task=task))
    now = identity(dataclasses.replace(TINY, task=task.with_all_options()))
    assert resume_errors(before, now) == []
    other = dataclasses.replace(task, weights={"b": 2.0})
    assert len(resume_errors(before, identity(dataclasses.replace(TINY, task=other)))) == 1


def started(folder: Path) -> RunConfig:
    """The configuration of a run that was started in ``folder`` and killed."""
    config = dataclasses.replace(TINY, output_dir=folder, num_steps=10)
    with claim_run(prepare_run(config, MACHINE)):
        pass
    return config


def checkpoint(config: RunConfig, step: int, **document: Any) -> Path:
    """As the trainer writes them, without its tensors."""
    folder = config.run_dir / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"tensors")
    position = RunPosition(step=step, version=step, **document)
    write_attachments(folder, {POSITION: to_bytes(position)})
    seal(folder, {"version": step, "ranks": 1})
    return folder


def resumed(config: RunConfig, **changes: Any) -> PreparedRun:
    config = with_value(config, "checkpoint.resume", True)
    for field, value in changes.items():
        config = with_value(config, field.replace("__", "."), value)
    return prepare_run(config, MACHINE)


def test_a_run_killed_before_its_first_checkpoint_is_compared_too(tmp_path: Path) -> None:
    config = started(tmp_path)
    assert resumed(config).notes == ()
    assert "start: step 1 again; " in resumed(config).describe()
    assert resumed(config, num_steps=20).notes == (
        "changed since the run's last start: num_steps: 10 -> 20",
    )
    with pytest.raises(ConfigError) as refused:
        resumed(config, seed=5, rollout__group_size=4)
    assert [one.split(":")[0] for one in refused.value.errors] == [
        "seed is 5",
        "rollout.group_size is 4",
    ]


def test_what_changed_since_the_checkpoint_is_a_note(tmp_path: Path) -> None:
    config = started(tmp_path)
    config = with_value(config, "trainer.loss.importance_weight", "none")
    saved = identity(with_value(config, "generator.replicas", 1))
    checkpoint(config, 4, identity=saved, evaluated_step=0)
    (note,) = resumed(config, num_steps=20).notes
    assert note == "changed since the checkpoint: num_steps: 10 -> 20, generator.replicas: 1 -> 2"


def test_profiled_steps_that_were_taken_before_are_a_note(tmp_path: Path) -> None:
    config = started(tmp_path)
    checkpoint(config, 4, identity=identity(config), evaluated_step=0)
    _, note = resumed(config, profile__steps=(3, 4, 5)).notes
    assert note == "profile.steps: 3, 4 not profiled, because the checkpoint has version 4"


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path) -> None:
    config = started(tmp_path)
    checkpoint(config, 4, identity=identity(config))
    with pytest.raises(ConfigError, match="num_steps is 3: the run has taken 4 steps"):
        resumed(config, num_steps=3)


def test_a_complete_run_is_told_so_and_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = started(tmp_path)
    checkpoint(config, 10, identity=identity(config), evaluated_step=10)
    assert not resumed(config).is_complete  # its policy is not exported yet
    (config.run_dir / "policy").mkdir()
    (config.run_dir / "policy" / "config.json").write_text("{}")
    assert not resumed(config).is_complete  # it was killed before it listed its files
    write_manifest(config.run_dir)
    assert resumed(config).is_complete
    assert not resumed(config, num_steps=11).is_complete
    found = resumed(config).resume_point
    assert found is not None
    assert not is_complete(dataclasses.replace(found, version=0), config)  # nothing was trained
    words = ["--output-dir", str(tmp_path), "--num-steps", "10", "--checkpoint.resume"]
    assert main(["train", TINY_FILE, *words]) == 0
    assert "all 10 steps are done" in capsys.readouterr().out


def test_a_run_without_a_record_of_its_configuration_goes_on_and_says_so(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, output_dir=tmp_path, num_steps=10)
    checkpoint(config, 4)
    (note,) = resumed(config).notes
    assert "does not say what the run was" in note


def test_a_folder_that_became_a_runs_since_it_was_looked_at_is_refused(tmp_path: Path) -> None:
    prepared = prepare_run(dataclasses.replace(TINY, output_dir=tmp_path), MACHINE)
    with claim_run(prepared):
        pass
    with pytest.raises(ConfigError, match="holds a run already"), claim_run(prepared):
        pass


def test_a_run_that_is_going_on_is_not_resumed(tmp_path: Path) -> None:
    config = started(tmp_path)
    with claim_run(resumed(config)), pytest.raises(ConfigError, match="runs in"):
        resumed(config)


def test_a_run_of_which_every_checkpoint_is_damaged_ends_with_one_line_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl.commands.train.stay_on_cores", lambda cores: None)
    monkeypatch.delitem(sys.modules, "torchtitan_rl.backends.monarch.run", raising=False)
    config = started(tmp_path)
    for step in (4, 8):
        (checkpoint(config, step, identity=identity(config)) / "data").write_bytes(b"tens")
    metrics = config.run_dir / "metrics.jsonl"
    metrics.write_text('{"step":8,"train/reward_mean":0.5}\n')
    words = ["--output-dir", str(tmp_path), "--num-steps", "10", "--checkpoint.resume"]
    assert main(["train", TINY_FILE, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: CheckpointError: no checkpoint in ")
    assert "step-000004 is not complete" in line
    assert "step-000008 is not complete" in line
    assert metrics.read_text() == '{"step":8,"train/reward_mean":0.5}\n'
    saved = sorted(path.name for path in (config.run_dir / "checkpoints").iterdir())
    assert saved == ["step-000004", "step-000008"]
    assert "torchtitan_rl.backends.monarch.run" not in sys.modules


@pytest.mark.parametrize("room", [0, 100])  # neither the lock, nor what the run is
def test_a_run_on_a_full_disk_ends_with_one_line_and_leaves_the_folder_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], room: int
) -> None:
    with files_of_at_most(room):
        assert main(["train", TINY_FILE, "--output-dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    folder = tmp_path / TINY.name
    assert line.startswith(
        f"error: output_dir is {tmp_path}: {folder} cannot be written to (File too large)"
    )
    assert [path.name for path in folder.iterdir()] == ["run.lock"]
    started(tmp_path)


def test_a_folder_for_logs_that_cannot_be_made_ends_the_run_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / TINY.name
    folder.mkdir()
    (folder / TINY.log_dir.name).touch()
    assert main(["train", TINY_FILE, "--output-dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: output_dir is {tmp_path}: {folder} cannot be written to (File exists)"
    )
