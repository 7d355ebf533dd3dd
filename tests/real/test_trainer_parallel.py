"""Every parallel layout is the same trainer: 2 gloo ranks against one process."""

from __future__ import annotations

import faulthandler
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.real.models import tiny_model
from tests.real.trainer_helpers import TIMEOUT_S, free_ports, random_batch, run_ranks, trainer
from torchtitan_rl.errors import DivergedError
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.logprobs import TaughtRows, selected_logprobs
from torchtitan_rl.training.losses.metrics import AGE_BUCKETS
from torchtitan_rl.weights.image import (
    TensorPart,
    plan_image,
    read_image,
    write_header,
    write_parts,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"data_parallel_shard": 2},
    "tp": {"tensor_parallel": 2},
    "hsdp": {"data_parallel_replicate": 2},
    "cp": {"context_parallel": 2},
}
FAMILIES = ("qwen2", "llama", "mistral")  # next to Qwen3, which takes every step
OF_FAMILIES = ("tp", "cp")  # whose weights are sharded as FSDP's
PORTS = 3 + len(FAMILIES)  # of a layout
OFF_POLICY = LossConfig(
    ratio="sequence",
    proximal_policy="interpolated",
    importance_weight="token",
    mask="geometric",
    mask_low=0.5,
    mask_high=2.0,
    aggregation="sequence_mean",
    kl_coefficient=0.5,
)
METRICS = (
    "loss",
    "grad_norm",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "clip_share",
    "logprob_diff_mean",
    "logprob_diff_max",
    "trained_tokens",
    "shared_share",
)


def batches() -> list[TrainingBatch]:
    """More episodes than one microbatch holds."""
    return [random_batch(seed=1, num_episodes=9), random_batch(seed=2, num_episodes=7)]


def batches_of_many_versions() -> list[TrainingBatch]:
    """Sampled zero to four versions before the first step, one version an episode, and not too far
    from the policy. Episodes have one of two teachers, or none."""
    result = []
    for batch in batches():
        versions = np.where(batch.loss_mask, -(batch.episode_ids % 5), -1)
        batch = replace(batch, versions=versions, logprobs=batch.logprobs - 1.5)
        numbers = np.arange(batch.num_episodes) % 3 - 1
        result.append(replace(batch, teachers=numbers, teacher_coefficient=0.5))
    return result


def run_steps(
    checkpoint: Path, resume: Path, folder: Path, ports: list[int], **fields: Any
) -> None:
    """One step from the checkpoint ``resume`` (written where it is not there), then two from the
    start. Each process group has a port of its own: a rank must not meet the previous one's."""
    os.environ["MASTER_PORT"] = str(ports[0])
    with trainer(checkpoint, **fields) as policy_trainer:
        if not resume.exists():
            policy_trainer.train_step(batches()[0])
            policy_trainer.save_checkpoint(resume)
        policy_trainer.load_checkpoint(resume)
        resumed = policy_trainer.train_step(batches()[1]).metrics
        policy_trainer.save_checkpoint(folder / "checkpoint", {})
        policy_trainer.train_step(batches()[0])  # all ranks write while they train
        policy_trainer.finish_checkpoint()
    os.environ["MASTER_PORT"] = str(ports[1])
    with trainer(checkpoint, **fields) as policy_trainer:
        metrics = [policy_trainer.train_step(batch).metrics for batch in batches()]
        logprobs = policy_trainer.logprobs(batches()[1])
        weights = policy_trainer.hf_state_dict()
        parts = policy_trainer.hf_parts()
        written = None if parts is None else written_together(parts)
        bad = batches()[1]
        bad.advantages[np.nonzero(bad.loss_mask)[0][0]] = np.nan  # on one of the ranks
        with pytest.raises(DivergedError, match="after version 2"):
            policy_trainer.train_step(bad)
        policy_trainer.export_hf(folder / "exported")
    os.environ["MASTER_PORT"] = str(ports[2])
    off_policy: list[dict[str, float]] = []
    if "context_parallel" not in fields:  # which takes no teachers; see test_trainer_context
        off_policy = off_policy_steps(checkpoint, **fields)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(weights, folder / "weights.pt")
        torch.save(written, folder / "written.pt")
        np.save(folder / "logprobs.npy", logprobs)
        (folder / "metrics.json").write_text(json.dumps([*metrics, resumed]))
        (folder / "off-policy.json").write_text(json.dumps(off_policy))
    elif os.environ["RANK"] == "1":
        assert weights == {}
        np.save(folder / "logprobs-of-rank-1.npy", logprobs)


def off_policy_steps(checkpoint: Path, **fields: Any) -> list[dict[str, float]]:
    """The metrics of steps on batches of many versions, with a reference policy and teachers."""
    from torchtitan_rl.backends.titan.trainer import DeviceMemory

    teachers = [checkpoint.parent / name for name in ("qwen2", "deep")]
    with trainer(checkpoint, loss=OFF_POLICY, teachers=teachers, **fields) as policy_trainer:
        memory = DeviceMemory(policy_trainer.state_tensors)
        metrics = []
        for batch in batches_of_many_versions():
            if "RANK" in os.environ:  # the one process to compare with keeps its memory
                memory.offload()
                memory.onload()
            metrics.append(policy_trainer.train_step(batch).metrics)
        return metrics


def run_families(root: Path, folder: Path, ports: list[int], **fields: Any) -> None:
    """One step and the logprobs after it, of each family."""
    for family, port in zip(FAMILIES, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with trainer(root / family, **fields) as policy_trainer:
            metrics = policy_trainer.train_step(batches()[0]).metrics
            logprobs = policy_trainer.logprobs(batches()[1])
        if int(os.environ.get("RANK", "0")) == 0:
            (folder / f"{family}.json").write_text(json.dumps([metrics]))
            np.save(folder / f"{family}.npy", logprobs)


def written_together(parts: dict[str, TensorPart]) -> dict[str, torch.Tensor]:
    """What all ranks' parts make, added up: one that two ranks write would count twice."""
    layout = plan_image({name: part.whole() for name, part in parts.items()}, version=3)
    image = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    write_parts(layout, parts, image)
    dist.all_reduce(image)
    write_header(layout, image)
    return read_image(image, version=3)


def one_rank(
    rank: int, layouts: dict[str, dict[str, Any]], checkpoint: Path, root: Path, ports: list[int]
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S - 10.0, exit=True)
    for index, (name, fields) in enumerate(layouts.items()):
        own = ports[PORTS * index : PORTS * (index + 1)]
        run_steps(checkpoint, root / "one" / "resume", root / name, own[:3], **fields)
        if name in OF_FAMILIES:
            run_families(root, root / name, own[3:], **fields)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, then the same steps in every layout; a folder of results each."""
    root = tmp_path_factory.mktemp("layouts")
    checkpoint = tiny_model(root / "policy")
    for family in FAMILIES:
        tiny_model(root / family, family=family)
    tiny_model(root / "deep", tied=False, seed=3, hidden_size=96, num_layers=3)
    (root / "one").mkdir()
    run_steps(checkpoint, root / "one" / "resume", root / "one", [0, 0, 0])
    run_families(root, root / "one", [0] * len(FAMILIES))
    run_layouts(LAYOUTS, 2, root)
    return root


def run_layouts(layouts: dict[str, dict[str, Any]], num_ranks: int, root: Path) -> None:
    for name in layouts:
        (root / name).mkdir()
    ports = free_ports(PORTS * len(layouts))
    run_ranks(one_rank, num_ranks, layouts, root / "policy", root, ports)


def read_metrics(folder: Path, name: str = "metrics.json") -> list[dict[str, float]]:
    metrics: list[dict[str, float]] = json.loads((folder / name).read_text())
    return metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_norm_and_metrics_equal_those_of_one_process(
    layout: str, results: Path
) -> None:
    for found, expected in zip(
        read_metrics(results / layout), read_metrics(results / "one"), strict=True
    ):
        for name in METRICS:
            assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", OF_FAMILIES)
def test_layouts_of_other_families_equal_one_process(
    layout: str, family: str, results: Path
) -> None:
    (found,) = read_metrics(results / layout, f"{family}.json")
    (expected,) = read_metrics(results / "one", f"{family}.json")
    for name in METRICS:
        assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
    np.testing.assert_allclose(
        np.load(results / layout / f"{family}.npy"),
        np.load(results / "one" / f"{family}.npy"),
        atol=1e-4,
    )


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one != "cp"])
def test_sequence_losses_reference_kl_and_metrics_by_age_equal_those_of_one_process(
    layout: str, results: Path
) -> None:
    expected = read_metrics(results / "one", "off-policy.json")
    assert {name.split("/")[0] for name in expected[0] if "/" in name} == set(AGE_BUCKETS)
    assert expected[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert expected[1]["kl_reference"] > 5e-4
    assert expected[1]["kl_teacher"] > 0.1
    for name in ("masked_share", "clip_share", "weight_capped_share", "effective_share"):
        assert 0.0 < expected[0][name] < 1.0, name
    of_layout = {"step_s", "padding_share", "weights_digest"}
    of_layout |= {name for name in expected[0] if "per_second" in name}
    for found, wanted in zip(
        read_metrics(results / layout, "off-policy.json"), expected, strict=True
    ):
        assert found.keys() == wanted.keys()
        for name in wanted.keys() - of_layout:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
        flops, same = (
            one["flops_per_second_per_rank"] / one["tokens_per_second_per_rank"]
            for one in (found, wanted)
        )
        assert flops == pytest.approx(same, rel=0.3)  # cut trees repeat tokens


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_what_the_ranks_write_together_are_the_gathered_weights(layout: str, results: Path) -> None:
    weights = torch.load(results / layout / "weights.pt")
    written = torch.load(results / layout / "written.pt")
    assert written.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(written[name], weights[name])] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updated_weights_and_logprobs_equal_those_of_one_process(
    layout: str, results: Path
) -> None:
    expected = torch.load(results / "one" / "weights.pt")
    found = torch.load(results / layout / "weights.pt")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam turns rounding in a gradient near 0 into a part of a step of 1e-3.
        torch.testing.assert_close(found[name], tensor, atol=5e-5, rtol=0)
    logprobs = np.load(results / layout / "logprobs.npy")
    np.testing.assert_allclose(logprobs, np.load(results / "one" / "logprobs.npy"), atol=1e-4)
    assert np.array_equal(logprobs, np.load(results / layout / "logprobs-of-rank-1.npy"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_one_layout_resumes_in_another(layout: str, results: Path) -> None:
    """One process wrote what the layout loaded; here one process loads what the layout wrote."""
    steps = read_metrics(results / layout)
    assert steps[2]["loss"] == pytest.approx(steps[1]["loss"], rel=2e-5)
    with trainer(results / "policy") as policy_trainer:
        policy_trainer.load_checkpoint(results / layout / "checkpoint")
        assert policy_trainer.version == 2
        found = policy_trainer.logprobs(batches()[1])
    np.testing.assert_allclose(found, np.load(results / layout / "logprobs.npy"), atol=1e-4)


@pytest.mark.soak
def test_layouts_of_four_ranks_equal_one_process(results: Path) -> None:
    layouts = {
        "fsdp-tp": {"data_parallel_shard": 2, "tensor_parallel": 2},
        "hsdp-2x2": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    }
    run_layouts(layouts, 4, results)
    for layout in layouts:
        test_loss_gradient_norm_and_metrics_equal_those_of_one_process(layout, results)
        test_updated_weights_and_logprobs_equal_those_of_one_process(layout, results)
        test_a_checkpoint_of_one_layout_resumes_in_another(layout, results)
        test_what_the_ranks_write_together_are_the_gathered_weights(layout, results)


def uneven_rank(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    logits, targets, upstream = logits_of_uneven_shards()
    shards = logits.chunk(2, dim=1)
    own = shards[rank].clone().requires_grad_()
    teacher = shards[rank].flip(0)
    logprobs, entropy, kl = selected_logprobs(
        own,
        targets,
        torch.arange(len(targets)),
        group=dist.group.WORLD,
        shard_size=shards[0].shape[1],
        taught=[TaughtRows(slice(0, len(own)), teacher.__getitem__)],
    )
    (gradient,) = torch.autograd.grad(((logprobs + kl) * upstream).sum(), own)
    torch.save((logprobs.detach(), entropy, kl.detach(), gradient), folder / f"{rank}.pt")
    dist.destroy_process_group()


def logits_of_uneven_shards() -> tuple[torch.Tensor, ...]:
    """Rows for many chunks of a vocabulary that two ranks do not divide, targets, a gradient."""
    torch.manual_seed(0)
    logits = torch.randn(8000, 2001)
    return logits, torch.randint(0, logits.shape[1], (len(logits),)), torch.randn(len(logits))


def test_ranks_that_split_the_vocabulary_unevenly_equal_one(tmp_path: Path) -> None:
    logits, targets, upstream = logits_of_uneven_shards()
    rows = torch.arange(len(targets))
    run_ranks(uneven_rank, 2, free_ports(1)[0], tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    taught = [TaughtRows(slice(0, len(logits)), logits.flip(0).__getitem__)]
    expected = selected_logprobs(logits.requires_grad_(), targets, rows, taught=taught)
    (gradient,) = torch.autograd.grad(((expected[0] + expected[2]) * upstream).sum(), logits)
    for own in found:
        torch.testing.assert_close(own[:3], expected)
    torch.testing.assert_close(torch.cat([own[3] for own in found], dim=1), gradient)


def test_a_wrong_number_of_ranks_is_refused(results: Path) -> None:
    with (
        pytest.raises(ValueError, match="configured for 2 ranks and runs on 1"),
        trainer(results / "policy", tensor_parallel=2),
    ):
        pass
