"""The trainer as the controller sees it: two ranks as Monarch actors, each in a process."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.real.models import tiny_model
from tests.real.trainer_helpers import CONFIG, MAX_STEPS, random_batch
from torchtitan_rl.backends.monarch.runtime import supervise
from torchtitan_rl.backends.monarch.trainer import MonarchTrainer
from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import MARKER, load_attachment
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.training.config import ProfileConfig
from torchtitan_rl.weights.config import Transport
from torchtitan_rl.weights.distribution import SharedMemoryHandle


def test_the_trainer_trains_publishes_and_saves_while_a_checkpoint_is_being_written(
    tmp_path: Path,
) -> None:
    spec = TrainerSpec(
        checkpoint=tiny_model(tmp_path / "policy"),
        trainer=dataclasses.replace(CONFIG, data_parallel_shard=2, step_timeout_s=120.0),
        dtype="float32",
        seed=0,
        num_steps=MAX_STEPS,
        run_dir=tmp_path,
        log_dir=tmp_path,
        trace_dir=None,
        profile=ProfileConfig(steps=(3,), ranks=(1,)),
    )
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")

    async def check() -> None:
        supervise()
        group = ProcessGroup(name="trainer", ranks=2, threads=1, devices=(), seed=0)
        trainer = await MonarchTrainer.spawn(group, spec)
        try:
            await trainer.start(Transport.SHARED_MEMORY)
            await trainer.finish_checkpoint()  # nothing to wait for
            await trainer.train_step(random_batch())
            saved = {"groups": b"12"}
            await trainer.save_checkpoint(checkpoints.path(1), saved, version=1)
            _, _, output = await asyncio.gather(
                trainer.finish_checkpoint(),
                trainer.finish_checkpoint(),
                trainer.train_step(random_batch(seed=1)),
            )
            assert output.version == 2
            assert checkpoints.steps() == [1]
            assert load_attachment(checkpoints.path(1), "groups") == b"12"

            handles = [await trainer.publish()]
            for _ in range(2):
                await trainer.train_step(random_batch())
                handles.append(await trainer.publish(frozenset({2})))
            assert [handle.version for handle in handles] == [2, 3, 4]
            for handle in handles:
                assert isinstance(handle, SharedMemoryHandle)
                assert Path(handle.path).stat().st_size == handle.num_bytes
            # Each rank wrote its share; the export gathers.
            await trainer.export_hf(tmp_path / "export")
            published = load_file(handles[-1].path)
            exported = load_file(tmp_path / "export" / "model.safetensors")
            assert published.keys() == exported.keys()
            assert all(torch.equal(published[name], exported[name]) for name in exported)

            # What cannot be written is told to all who wait, and does not end the trainer.
            (tmp_path / "file").touch()
            with pytest.raises(CheckpointError, match="file/step-000004"):
                await trainer.save_checkpoint(tmp_path / "file" / "step-000004", {}, version=4)
            # A state of other weights than the trainer holds is not written.
            with pytest.raises(
                CheckpointError, match="holds version 4 and the run is at version 3"
            ):
                await trainer.save_checkpoint(checkpoints.path(3), {}, version=3)
            await trainer.save_checkpoint(checkpoints.path(4), {"../outside": b""}, version=4)
            told = await asyncio.gather(
                trainer.finish_checkpoint(), trainer.finish_checkpoint(), return_exceptions=True
            )
            assert [type(error) for error in told] == [CheckpointError] * 2
            await trainer.finish_checkpoint()
            assert checkpoints.steps() == [1]

            await trainer.load_checkpoint(checkpoints.path(1))
            assert (await trainer.train_step(random_batch(seed=1))).metrics["loss"] == (
                output.metrics["loss"]
            )
            await trainer.save_checkpoint(checkpoints.path(2), {}, version=2)
        finally:
            await trainer.close()
        assert not any(Path(handle.path).exists() for handle in handles)

    asyncio.run(check())
    assert checkpoints.steps() == [1, 2]  # closing finished the last
    (profile,) = (tmp_path / "profile").iterdir()  # of the one chosen rank
    with gzip.open(profile) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert (profile.name, "optimizer step 3" in names) == ("step3-rank1.json.gz", True)
    assert not (checkpoints.path(2) / "attachments").exists()
    assert (checkpoints.path(2) / MARKER).is_file()
