"""The trainer's device, deadlines and attention, on machines that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torchtitan_rl.backends.titan import model
from torchtitan_rl.backends.titan.setup import check_device, set_up
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.training.config import TrainerConfig

# isort: split
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.common.attention import FlexAttention, VarlenAttention


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_all_groups_of_ranks_wait_longer_than_the_controller(
    eight_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, timedelta] = {}
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_set_pg_timeout",
        lambda timeout, group: found.update({group.group_name: timeout}),
    )
    config = TrainerConfig(
        data_parallel_replicate=2, context_parallel=2, tensor_parallel=2, step_timeout_s=100.0
    )
    layout = set_up(config)
    assert set(found.values()) == {timedelta(seconds=160)}
    groups = [layout.data_group, layout.context_group, layout.tensor_group]
    groups += [layout.dims.get_mesh(axis).get_group() for axis in ("fsdp", "dp_replicate")]
    assert {group.group_name for group in groups if group is not None} <= found.keys()
    # The ranks that share a pass are neighbours, and hold different shards.
    members = [dist.get_process_group_ranks(group) for group in groups]
    assert members == [[0, 4], [0, 2], [0, 1], [0, 2], [0, 4]]


@pytest.mark.parametrize(
    ("planned", "found"), [("cuda", None), ("cpu", "cuda"), ("cpu", "mps"), ("cuda", "mps")]
)
def test_a_rank_refuses_to_compute_on_another_device_than_planned(
    planned, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices are counted even if the driver is too old for torch, which then takes the CPU."""
    check_device("cpu")
    accelerator = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    with pytest.raises(ConfigError, match=f"planned for {planned}, and .* on {found or 'cpu'}"):
        check_device(planned)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), VarlenAttention),
        ((8, 9), VarlenAttention),
        ((9, 0), FlexAttention),
        ((10, 0), FlexAttention),
    ],
)
def test_attention_of_whole_episodes_needs_no_package_that_is_not_installed(
    capability: tuple[int, int], expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    config = TrainerConfig(share_prefixes=False)
    attention = model._inner_attention(torch.device("cuda"), "bfloat16", config)
    assert type(attention.build()) is expected
