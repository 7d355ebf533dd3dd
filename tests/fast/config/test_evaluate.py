"""``torchtitan-rl eval`` before a process starts: which models, and what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_rl import RunConfig
from torchtitan_rl.commands import cli
from torchtitan_rl.config.evaluate import (
    EvalConfig,
    PreparedEvaluation,
    find_models,
    has_export,
    note_export,
    prepare_evaluation,
    write_identity,
)
from torchtitan_rl.config.resume import policy_fingerprint
from torchtitan_rl.configs import alphabet_sort_tiny
from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.training.checkpoint_files import MARKER, publish, seal, temporary_path

CONFIG = alphabet_sort_tiny.config


def make_run(run_dir: Path, *steps: int, policy: str | None = None) -> Path:
    """A run's folder with complete checkpoints that hold nothing."""
    for step in steps:
        path = run_dir / "checkpoints" / f"step-{step:06d}"
        temporary_path(path).mkdir(parents=True)
        seal(temporary_path(path), {"version": step})
        publish(path)
    run_dir.mkdir(exist_ok=True)
    fingerprint = policy or policy_fingerprint(POLICY_DIR)
    (run_dir / "identity.json").write_text(json.dumps({"policy.fingerprint": fingerprint}))
    return run_dir


def prepare(
    tmp_path: Path, *models: str, config: RunConfig = CONFIG, **options: object
) -> PreparedEvaluation:
    given = EvalConfig(
        models=models or (str(POLICY_DIR),),
        config="alphabet_sort_tiny",
        **{"output": tmp_path / "out", **options},  # type: ignore[arg-type]
    )
    return prepare_evaluation(given, config)


def errors(tmp_path: Path, *models: str, **options: object) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        prepare(tmp_path, *models, **options)  # type: ignore[arg-type]
    return raised.value.errors


def test_a_run_stands_for_the_checkpoints_that_it_keeps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 20)
    found = find_models([str(POLICY_DIR), str(run)], POLICY_DIR)
    assert [(one.name, one.step) for one in found] == [
        ("alphabet_sort/policy", 0),
        ("run/step-000010", 10),
        ("run/step-000020", 20),
    ]
    (one,) = find_models([str(run / "checkpoints" / "step-000020")], POLICY_DIR)
    assert one == found[2]
    assert len({one.fingerprint for one in found}) == 3


def test_an_export_is_of_the_checkpoint_as_it_was_then(tmp_path: Path) -> None:
    run, export = make_run(tmp_path / "run", 10), tmp_path / "export"
    (one,) = find_models([str(run)], POLICY_DIR)
    assert not has_export(export, one.fingerprint)
    shutil.copytree(POLICY_DIR, export)
    assert not has_export(export, one.fingerprint)
    note_export(export, one.fingerprint)
    assert has_export(export, one.fingerprint)
    marker = one.path / MARKER
    marker.write_text(marker.read_text() + "\n")
    os.utime(marker, (0, 0))  # older, as a copy may be
    assert not has_export(export, one.fingerprint)


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    other = make_run(tmp_path / "other", 10, policy="another")
    with pytest.raises(ConfigError) as raised:
        find_models([str(tmp_path), str(run), str(run), str(other)], POLICY_DIR)
    (nothing, foreign, twice) = raised.value.errors
    assert nothing.startswith(f"MODEL_OR_RUN is {tmp_path}: it is neither")
    assert "began with another model" in foreign
    assert "2 models are named run/step-000010" in twice


def test_settings_that_are_not_given_are_those_of_the_configuration(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    assert prepared.temperatures == (1.0,)
    assert prepared.samples == 1
    assert len(prepared.run.evaluation_problems) == 128
    assert prepared.groups_at_once == 256  # two replicas, 64 requests each, twice
    own = prepare(tmp_path, samples=8, problems=3, temperatures=(0.0, 0.5), max_rollouts=20)
    assert (own.samples, len(own.run.evaluation_problems), own.groups_at_once) == (8, 3, 2)
    assert own.folder == tmp_path / "out"
    train = prepare(tmp_path, split="train", problems=3).run.evaluation_problems
    assert [one.problem_id.split("/")[1] for one in train] == ["train"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "--samples is 0: it must be greater than or equal to 1"),
        ({"problems": 5000}, "--problems is 5000: the validation set has 1024 problems"),
        ({"temperatures": (-1.0,)}, "--temperatures is (-1.0,)"),
        ({"temperatures": (0.5, 0.5)}, "--temperatures: one is given twice"),
        ({"temperatures": (0.33333333, 0.33333334)}, "--temperatures: one is given twice"),
        ({"max_rollouts": 3, "samples": 4}, "--max-rollouts is 3: the 4 samples of a problem"),
        ({"output": Path("/proc/none")}, "--output is /proc/none"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, object], message: str) -> None:
    (error,) = errors(tmp_path, **options)
    assert error.startswith(message)


def test_each_model_must_fit_the_replicas(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(POLICY_DIR, model)
    facts = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 100}
    (model / "config.json").write_text(json.dumps(facts))
    (message,) = errors(tmp_path, str(model))
    assert message.startswith("MODEL_OR_RUN model: generator.max_model_len is 256")


def test_a_folder_is_not_continued_as_another_evaluation(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(POLICY_DIR, model)
    before = prepare(tmp_path, str(model))
    before.folder.mkdir()
    write_identity(before)
    more = prepare(tmp_path, str(model), samples=4, problems=9, temperatures=(0.0,))
    assert more.folder == before.folder
    assert errors(tmp_path, str(model), config=replace(CONFIG, seed=5)) == [
        f"seed is 5, and was 0: {before.folder} has rollouts of another evaluation; give another "
        "--output"
    ]
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    (message,) = errors(tmp_path, str(model))
    assert message.startswith("MODEL_OR_RUN: model was another model")


def test_rewards_of_problems_that_have_changed_are_not_kept(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"

    def prepare_rows(answers: str, problems: int, **changes: object) -> PreparedEvaluation:
        lines = [{"question": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = {"train": (str(data),), "validation": (str(data),), "shuffle": False, **changes}
        task = DataTask(**options)  # type: ignore[arg-type]
        return prepare(tmp_path, config=replace(CONFIG, task=task), problems=problems)

    before = prepare_rows("01234567", 4)
    before.folder.mkdir()
    write_identity(before)
    write_identity(prepare_rows("01234567", 6))
    write_identity(prepare_rows("0123456789", 2))
    for answers, wrong in (
        ("0X234567", "a problem has changed, the first one is data.jsonl:2"),
        ("01234Y67", "a problem has changed, the first one is data.jsonl:6"),
        ("abcdefgh", "6 problems have changed, the first one is data.jsonl:1"),
    ):
        with pytest.raises(ConfigError) as raised:
            prepare_rows(answers, 6)
        (message,) = raised.value.errors
        assert message.startswith(f"task: {wrong}: {before.folder} has rollouts of another")
    prepare_rows("012345XY", 8)  # those had no rollouts yet


def test_the_command_shows_its_plan_and_takes_options_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(POLICY_DIR), "--config", "alphabet_sort_tiny", "--generator.replicas", "1"]
    output = ["--output", str(tmp_path / "out")]
    assert cli.main(["eval", *words, *output, "--samples", "2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"model alphabet_sort/policy: {POLICY_DIR.resolve()}" in shown
    assert "rollouts: 2 of each of 128 validation problems, 128 at a time" in shown
    assert "replica0: 1 process" in shown
    assert "replica1" not in shown
    assert not (tmp_path / "out").exists()
    assert cli.main(["eval", "--config", "alphabet_sort_tiny"]) == 2
    assert "MODEL_OR_RUN" in capsys.readouterr().err
