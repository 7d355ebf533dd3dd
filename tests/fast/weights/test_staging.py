import mmap
from pathlib import Path

import pytest
import torch

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights import shm
from torchtitan_rl.weights.distribution import SharedMemoryHandle
from torchtitan_rl.weights.shm import SharedMemoryPublisher, WeightStaging


@pytest.fixture
def publisher(tmp_path: Path) -> SharedMemoryPublisher:
    return SharedMemoryPublisher("run", tmp_path / "run", root=tmp_path / "shm")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), value)}


def count_maps(monkeypatch: pytest.MonkeyPatch, **wanted: int) -> list[int]:
    """Sizes of the maps that are made with these options from now on."""
    made: list[int] = []
    map_memory = mmap.mmap

    def count_and_map(*args: int, **options: int) -> mmap.mmap:
        if options == wanted:
            made.append(args[1])
        return map_memory(*args, **options)

    monkeypatch.setattr(mmap, "mmap", count_and_map)
    return made


def test_staged_tensors_equal_the_published_ones(publisher: SharedMemoryPublisher) -> None:
    staging = WeightStaging()
    staging.stage(publisher.publish(1, weights(1)))
    assert torch.equal(staging.tensors(1)["w"], weights(1)["w"])


def test_tensors_in_use_outlive_their_file_and_their_version(
    publisher: SharedMemoryPublisher,
) -> None:
    staging = WeightStaging()
    staging.stage(publisher.publish(1, weights(1)))
    held = staging.tensors(1)["w"]
    staging.stage(publisher.publish(2, weights(2)))
    staging.discard_before(2)
    publisher.close()
    assert staging.versions == (2,)
    assert torch.equal(held, weights(1)["w"])


def test_a_reader_cannot_change_what_another_reader_sees(publisher: SharedMemoryPublisher) -> None:
    handle = publisher.publish(1, weights(1))
    first, second = WeightStaging(), WeightStaging()
    first.stage(handle)
    second.stage(handle)
    first.tensors(1)["w"].zero_()
    assert torch.equal(second.tensors(1)["w"], weights(1)["w"])


def test_a_map_is_reused_for_a_version_written_into_its_memory_later(
    publisher: SharedMemoryPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_maps(monkeypatch, access=mmap.ACCESS_COPY)
    staging = WeightStaging()
    files = set()
    for version in range(1, 13):
        handle = publisher.publish(version, weights(version))
        files.add(Path(handle.path).stat().st_ino)
        staging.stage(handle)
        staging.discard_before(version)
        assert torch.equal(staging.tensors(version)["w"], weights(version)["w"])
    # Three versions exist before one is released by its reader and its publisher.
    assert len(made) == len(files) <= 3


def test_a_map_that_the_model_wrote_to_does_not_hide_later_versions(
    publisher: SharedMemoryPublisher,
) -> None:
    """vLLM's gpt-oss sets biases to zero in place."""
    staging = WeightStaging()
    for version in range(1, 7):
        staging.stage(publisher.publish(version, weights(version)))
        staging.discard_before(version)
        tensor = staging.tensors(version)["w"]
        assert torch.equal(tensor, weights(version)["w"])
        if version < 5:
            tensor[-1] = -1.0
        del tensor


@pytest.mark.parametrize("content", [None])
def test_maps_are_not_reused_if_the_kernel_does_not_tell_what_was_written_to(
    publisher: SharedMemoryPublisher,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes | None,
) -> None:
    pagemap = tmp_path / "pagemap"
    if content is not None:
        pagemap.write_bytes(content)
    monkeypatch.setattr(shm, "_PAGEMAP", str(pagemap))
    staging = WeightStaging()
    for version in range(1, 7):
        staging.stage(publisher.publish(version, weights(version)))
        staging.discard_before(version)
        staging.tensors(version)["w"].fill_(-1.0)
    staging.stage(publisher.publish(7, weights(7)))
    assert torch.equal(staging.tensors(7)["w"], weights(7)["w"])


def test_a_version_that_is_released_or_mislabelled_fails_by_name(
    publisher: SharedMemoryPublisher,
) -> None:
    staging = WeightStaging()
    released = publisher.publish(1, weights(1))
    publisher.publish(2, weights(2))
    current = publisher.publish(3, weights(3))
    with pytest.raises(WeightSyncError, match="version 1: cannot map"):
        staging.stage(released)
    with pytest.raises(WeightSyncError, match="version 4 was requested, the image is of version 3"):
        staging.stage(SharedMemoryHandle(version=4, path=current.path, num_bytes=current.num_bytes))
    with pytest.raises(WeightSyncError, match=r"version 3: .* bytes instead of 5"):
        staging.stage(SharedMemoryHandle(version=3, path=current.path, num_bytes=5))
    assert staging.versions == ()
