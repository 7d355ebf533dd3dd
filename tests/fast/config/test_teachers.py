"""Teachers that do not fit a run are refused before any process starts; others are planned."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_mutations import with_value
from tests.support.ready_configs import LAPTOP, gpus
from torchtitan_rl import MixtureTask
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.config.resume import write_identity
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError

OTHER = "package:gsm8k"  # another tokenizer


def prepared(
    tmp_path: Path, machine: HostFacts = LAPTOP, config: RunConfig = TINY, **changes: Any
) -> PreparedRun:
    config = with_value(config, "output_dir", tmp_path)
    config = with_value(config, "teacher.checkpoint", config.policy.checkpoint)
    for name, value in changes.items():
        config = with_value(config, name.replace("__", "."), value)
    return prepare_run(config, machine)


def refusals(tmp_path: Path, **changes: Any) -> list[str]:
    return refusals_on(tmp_path, LAPTOP, **changes)


def refusals_on(tmp_path: Path, machine: HostFacts, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        prepared(tmp_path, machine, **changes)
    return raised.value.errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher__checkpoint": OTHER}, "teacher.checkpoint is package:gsm8k: it has another"),
        ({"teacher__checkpoint": "package:none"}, "teacher.checkpoint is 'package:none': there is"),
        ({"teacher__url": "http://h/v1"}, "teacher.url is http://h/v1: teacher.checkpoint is"),
        ({"teacher__checkpoint": "http://h/v1"}, "teacher.checkpoint is http://h/v1: give a ser"),
        ({"teacher__by_task": {"words": OTHER}}, "teacher.by_task has 'words': give the name of"),
        ({"teacher__tensor_parallel": 3}, "teacher.tensor_parallel is 3: give a divisor of the t"),
        ({"teacher__vllm": {"seed": 1}}, "teacher.vllm has seed, which is not passed on"),
        ({"teacher__timeout_s": 1e6}, "teacher.timeout_s is 1000000.0: give less than schedule.m"),
        (
            {"teacher__loss": "topk", "rollout__sampling__top_p": 0.9},
            "teacher.loss is topk: rollout.sampling.top_p excludes tokens",
        ),
        (
            {"teacher__checkpoint": "", "rollout__advantage": "none"},
            "rollout.advantage is none: without a teacher nothing would be trained",
        ),
        (
            {"teacher__checkpoint": "", "teacher__url": "http://127.0.0.1:1/v1"},
            "teacher.url is http://127.0.0.1:1/v1: ConnectError: All connection attempts failed; "
            "give a server with prompt logprobs",
        ),
        (
            {"teacher__checkpoint": "", "teacher__url": "http://127.0.0.1:99999/v1"},
            "teacher.url is http://127.0.0.1:99999/v1: port 99999: give at most 65535",
        ),
        ({"launch__hosts": "2x0"}, "teacher.checkpoint is /"),
        (
            {
                "teacher__loss": "full",
                "teacher__checkpoint": "",
                "teacher__url": "http://127.0.0.1:1/v1",
            },
            "teacher.loss is full: http://127.0.0.1:1/v1 is a server, and the trainer needs",
        ),
        ({"teacher__loss": "full", "teacher__replicas": 2}, "teacher.replicas is 2: with teacher"),
        ({"teacher__loss": "full", "teacher__timeout_s": 9.0}, "teacher.timeout_s is 9.0: with te"),
        ({"teacher__loss": "full", "teacher__top_k": 20}, "teacher.top_k is 20: it is read only w"),
        ({"teacher__top_k": 20}, "teacher.top_k is 20: it is read only with teacher.loss topk; le"),
        ({"teacher__model": "m"}, "teacher.model is m: no teacher is a server; leave it out"),
        (
            {"teacher__checkpoint": "", "teacher__url": "http://h/v1", "teacher__replicas": 2},
            "teacher.replicas is 2: the teacher is a server and has no replicas here; leave it out",
        ),
        ({"teacher__loss": "full", "mode": "generate"}, "teacher.loss is full: mode generate has"),
        ({"teacher__loss": "full", "launch__hosts": "2x0"}, "teacher.checkpoint is /"),
        (
            {"teacher__loss": "full", "trainer__context_parallel": 2},
            "trainer.context_parallel is 2: the",
        ),
    ],
)
def test_an_error_names_field_value_and_fix(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (found,) = refusals(tmp_path, **changes)
    assert found.startswith(message)


def other_teacher(folder: Path, **fields: Any) -> str:
    """The policy with other fields in ``config.json``."""
    shutil.copytree(TINY.policy.checkpoint, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | fields))
    return str(folder)


@pytest.mark.parametrize("loss", ["sampled", "full"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocab_size", 10, "its vocabulary has 10 tokens"),
        ("max_position_embeddings", 250, "the teacher has 250 positions"),
    ],
)
def test_a_teacher_that_cannot_score_every_token_is_refused(
    name: str, value: int, message: str, loss: str, tmp_path: Path
) -> None:
    teacher = other_teacher(tmp_path / "teacher", **{name: value})
    (found,) = refusals(tmp_path, teacher__checkpoint=teacher, teacher__loss=loss)
    assert message in found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "teacher.checkpoint: .*model_type 'gpt2' is not supported"),
        ({"num_key_value_heads": 1}, "give a divisor of the teacher's 4 heads and 1 key/value"),
        ({"vocab_size": 400}, "the teacher has 400 tokens and the policy 390, which the ranks"),
    ],
)
def test_a_teacher_that_the_trainers_ranks_cannot_hold_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    teacher = other_teacher(tmp_path / "teacher", **fields)
    changes = {"teacher__loss": "full", "trainer__tensor_parallel": 2}
    (found,) = refusals(tmp_path, teacher__checkpoint=teacher, **changes)
    assert re.search(message, found)


def test_replicas_of_a_teacher_that_takes_images_need_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = json.loads((Path(TINY.policy.checkpoint) / "config.json").read_text())["hidden_size"]
    teacher = other_teacher(
        tmp_path / "teacher",
        model_type="qwen2_5_vl",
        num_attention_heads=4,
        head_dim=16,
        vision_config={"out_hidden_size": size, "depth": 1},
        image_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    (tmp_path / "teacher" / "preprocessor_config.json").write_text("{}")
    monkeypatch.setattr("torchtitan_rl.config.images.find_spec", lambda _: None)
    (found,) = refusals(tmp_path, teacher__checkpoint=teacher)
    assert found.startswith("teacher.checkpoint takes images, for which vLLM needs torchvision")


def test_a_teacher_in_the_trainer_has_no_replicas_and_counts_in_its_memory(tmp_path: Path) -> None:
    machine, large = gpus(3), {"num_hidden_layers": 400}
    teacher = other_teacher(tmp_path / "teacher", **large)
    made = prepared(tmp_path, machine, teacher__loss="full", teacher__checkpoint=teacher)
    assert made.plan.teachers == ()
    assert made.teachers[teacher].directory == tmp_path / "teacher"
    assert made.memory is not None
    assert made.memory.teacher == {}
    assert made.memory.trainer["teachers"] > 100 * made.memory.trainer["weights"]
    assert "(in the trainer); coefficient 1" in made.describe()
    assert "teachers 0.8" in made.describe()
    full = replace(machine, device_bytes=2 << 30)
    (found,) = (
        one
        for one in refusals_on(tmp_path, full, teacher__loss="full", teacher__checkpoint=teacher)
        if one.startswith("trainer.max_tokens_per_microbatch")
    )
    assert "teachers 0.8" in found


def test_a_teacher_that_changed_since_the_start_is_refused_at_a_resume(tmp_path: Path) -> None:
    teacher = other_teacher(tmp_path / "teacher")
    made = prepared(tmp_path, teacher__checkpoint=teacher)
    made.config.run_dir.mkdir(parents=True)
    write_identity(made.config.run_dir, made.identity)
    changes = {"teacher__checkpoint": teacher, "checkpoint__resume": True}
    prepared(tmp_path, **changes)
    weights = tmp_path / "teacher" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    (found,) = refusals(tmp_path, **changes)
    assert found.startswith("teacher.checkpoint or teacher.by_task holds another model than the ru")


def test_each_part_of_a_mixture_may_have_a_teacher(tmp_path: Path) -> None:
    policy = TINY.policy.checkpoint
    task = MixtureTask(tasks={"a": TINY.task, "b": TINY.task, "c": TINY.task})
    config = replace(TINY, task=task)
    made = prepared(
        tmp_path,
        config=config,
        teacher__checkpoint="",
        teacher__by_task={"a": policy, "b": "package:alphabet_sort"},
    )
    teacher = made.config.teacher
    assert list(made.teachers) == [policy, "package:alphabet_sort"]
    assert [teacher.source_for(part) for part in "abc"] == [policy, "package:alphabet_sort", ""]
    assert [group.name for group in made.plan.teachers] == ["teacher0", "teacher1"]


def test_a_teachers_replicas_have_devices_of_their_own(tmp_path: Path) -> None:
    for placement, others in (("separate", 3), ("colocated", 2)):
        made = prepared(
            tmp_path,
            gpus(others + 4),
            placement=placement,
            teacher__replicas=2,
            teacher__tensor_parallel=2,
            metrics__trace=placement == "separate",
        )
        plan = made.plan
        assert plan.trainer is not None
        used = {one for group in (*plan.replicas, plan.trainer) for one in group.devices}
        taught = [group.devices for group in plan.teachers]
        assert list(map(len, taught)) == [2, 2]
        assert used.isdisjoint(one for group in taught for one in group)
        assert len(used) == others
        assert plan.num_devices == others + 4
        assert "teacher1: 2 processes on cuda:" in made.describe()
        assert made.memory is not None
        assert made.memory.teacher["scores"] > 0
        with pytest.raises(ConfigError, match=f"need {others + 4} CUDA devices"):
            prepared(
                tmp_path,
                gpus(others + 3),
                placement=placement,
                teacher__replicas=2,
                teacher__tensor_parallel=2,
            )


def test_a_run_that_trains_on_recorded_rollouts_starts_no_teacher(tmp_path: Path) -> None:
    made = prepared(tmp_path, mode="train", rollouts=tmp_path, teacher__checkpoint="/moved")
    assert made.plan.teachers == ()
    assert made.teachers == {}
