from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.image import (
    TensorPart,
    plan_image,
    read_image,
    write_header,
    write_image,
    write_parts,
)
from torchtitan_rl.weights.remote import boxes_of, pack


def make_image(tensors: dict[str, torch.Tensor], version: int = 3) -> torch.Tensor:
    layout = plan_image(tensors, version)
    image = torch.empty(layout.num_bytes, dtype=torch.uint8)
    write_image(layout, tensors, image)
    return image


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    return {
        "a.bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "transposed": base.t(),
        "sliced": base[:, 1::2],
        "tied": base,
        "half": torch.randn(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


def test_what_is_read_equals_what_was_written_for_tied_and_non_contiguous_tensors() -> None:
    tensors = odd_tensors()
    read = read_image(make_image(tensors), 3)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor.detach()), name


def cut(tensor: torch.Tensor, dim: int, start: int, end: int) -> TensorPart:
    return TensorPart(
        shape=tensor.shape,
        dtype=tensor.dtype,
        offset=tuple(start if d == dim else 0 for d in range(tensor.dim())),
        local=tensor.narrow(dim, start, end - start),
    )


def test_parts_of_several_writers_make_the_same_image() -> None:
    tensors = {"rows": torch.randn(5, 3), "columns": torch.randn(4, 6), "one": torch.randn(3)}
    writers = [
        {
            "rows": cut(tensors["rows"], 0, *rows),
            "columns": cut(tensors["columns"], 1, *columns),
            "one": TensorPart(shape=torch.Size([3]), dtype=torch.float32, offset=(0,), local=whole),
        }
        for rows, columns, whole in (
            ((0, 3), (0, 4), tensors["one"]),
            ((3, 5), (4, 6), None),
            ((5, 5), (6, 6), None),  # it has nothing
        )
    ]
    layout = plan_image({name: part.whole() for name, part in writers[0].items()}, version=3)
    image = torch.full((layout.num_bytes,), 7, dtype=torch.uint8)
    write_header(layout, image)
    for parts in writers:
        write_parts(layout, parts, image)
    assert torch.equal(image, make_image(tensors))


def test_the_safetensors_library_reads_the_image(tmp_path: Path) -> None:
    tensors = odd_tensors()
    path = tmp_path / "image.safetensors"
    path.write_bytes(bytes(make_image(tensors).numpy()))
    with safe_open(path, "pt") as file:
        assert file.metadata()["policy_version"] == "3"
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_an_image_of_another_version_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="version 4 was requested, the image is of version 3"):
        read_image(make_image({"w": torch.ones(2)}), 4)


@pytest.mark.parametrize("kept_bytes", [0, 4, 40, -4])
def test_a_truncated_image_is_refused(kept_bytes: int) -> None:
    image = make_image({"w": torch.ones(8)})
    with pytest.raises(WeightSyncError, match="not a complete safetensors image"):
        read_image(image[:kept_bytes].clone(), 3)


def test_nothing_and_unknown_dtypes_cannot_be_published() -> None:
    with pytest.raises(WeightSyncError, match="no tensors"):
        plan_image({}, 1)
    with pytest.raises(WeightSyncError, match=r"w \(torch.complex64\)"):
        plan_image({"w": torch.ones(1, dtype=torch.complex64)}, 1)


class DtypesOfCopies(TorchDispatchMode):
    """Records the dtypes of source and target of each copy into existing memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0].dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))


def test_elements_are_converted_before_they_are_copied() -> None:
    """A copy from a device that also converts would do so on the CPU, with twice the bytes."""
    local = torch.randn(6, 4)
    part = TensorPart(
        shape=torch.Size((6, 8)), dtype=torch.bfloat16, offset=(0, 4), local=local.clone()
    )
    layout = plan_image({"w": part.whole()}, 3)
    image = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    packed = torch.zeros(2 * local.numel(), dtype=torch.uint8)
    with DtypesOfCopies() as copies:
        write_header(layout, image)
        write_parts(layout, {"w": part}, image)
        pack(boxes_of({"w": part}), {"w": part}, packed)
    assert len(copies.seen) == 3
    assert all(source == target for source, target in copies.seen)
    assert torch.equal(read_image(image, 3)["w"][:, 4:], local.bfloat16())
    assert torch.equal(packed.view(torch.bfloat16).view(6, 4), local.bfloat16())
