"""A set of weights as one byte image in the safetensors layout, written and read in place.

The image is written directly into memory of the caller (a mapped file, a buffer for remote reads),
and its tensors are views of this memory, so each byte is copied only once.

Invariants: tensors start at multiples of their item size, without gaps; the metadata contains the
policy version, and reading checks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchtitan_rl.errors import WeightSyncError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH_BYTES = 8  # the header's length, little-endian, comes first
_VERSION_KEY = "policy_version"
_VERSION_DIGITS = 20  # reserved, so that images of all versions have the same size


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The header, and where each tensor begins in the image."""

    version: int
    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int


class Box(NamedTuple):
    """A box in the tensor ``name`` of shape ``shape``: it begins at ``offset`` and has the shape
    ``size``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class PackedPart(NamedTuple):
    """One part, and the XXH3 checksum (64 bits) of its bytes in row-major order."""

    box: Box
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """One process's part of a tensor of ``shape`` and ``dtype``: the box ``local`` at ``offset``.
    ``local`` is None if other processes write the whole tensor."""

    shape: torch.Size
    dtype: torch.dtype
    offset: tuple[int, ...]
    local: torch.Tensor | None

    def whole(self) -> torch.Tensor:
        """Return an empty tensor like the whole tensor, for `plan_image`."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def elements(self) -> torch.Tensor:
        """Return the local elements in ``dtype``; ``local`` must not be None. They are converted on
        their device: a copy that also converts would move them in their old dtype."""
        assert self.local is not None
        return self.local.detach().to(self.dtype)

    def box(self, name: str) -> Box:
        """Return the position of the local elements; ``local`` must not be None."""
        assert self.local is not None
        return Box(name, tuple(self.shape), self.dtype, self.offset, tuple(self.local.shape))


def plan_image(tensors: Mapping[str, torch.Tensor], version: int) -> ImageLayout:
    """Lay out ``tensors`` in an image, largest item size first, so that all are aligned.

    Tensors that share storage (a tied lm_head) are written once per name.

    Raises:
        WeightSyncError: there are no tensors, or safetensors does not know a dtype.
    """
    if not tensors:
        raise WeightSyncError(f"version {version}: there are no tensors to publish")
    unknown = [f"{name} ({t.dtype})" for name, t in tensors.items() if t.dtype not in _CODES]
    if unknown:
        raise WeightSyncError(f"version {version}: dtype without a safetensors code: {unknown}")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", _VERSION_KEY: str(version)}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        starts[name] = end
        end += tensor.nbytes
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * max(0, _VERSION_DIGITS - len(str(version)))
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return ImageLayout(
        version=version,
        header=header,
        offsets={name: len(header) + start for name, start in starts.items()},
        num_bytes=len(header) + end,
    )


def write_image(
    layout: ImageLayout, tensors: Mapping[str, torch.Tensor], image: torch.Tensor
) -> None:
    """Copy ``tensors`` (any device, contiguous or not) into ``image``, uint8 [num_bytes]."""
    write_header(layout, image)
    write_parts(layout, whole_parts(tensors), image)


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorPart]:
    return {
        name: TensorPart(shape=t.shape, dtype=t.dtype, offset=(0,) * t.dim(), local=t)
        for name, t in tensors.items()
    }


def write_parts(layout: ImageLayout, parts: Mapping[str, TensorPart], image: torch.Tensor) -> None:
    """Copy one process's parts into ``image``, uint8 [num_bytes]; one process also calls
    `write_header`."""
    for name, part in parts.items():
        if part.local is not None and part.local.numel():
            view_of(layout, part.box(name), image).copy_(part.elements())


def view_of(layout: ImageLayout, box: Box, image: torch.Tensor) -> torch.Tensor:
    """Return the box in ``image``, uint8 [num_bytes], as a view with the tensor's dtype."""
    start = layout.offsets[box.name]
    end = start + math.prod(box.shape) * box.dtype.itemsize
    view = image[start:end].view(box.dtype).view(box.shape)
    for dim, size in enumerate(box.size):
        if size != box.shape[dim]:
            view = view.narrow(dim, box.offset[dim], size)
    return view


def write_header(layout: ImageLayout, image: torch.Tensor) -> None:
    header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    image[: len(layout.header)].copy_(header)


def read_image(image: torch.Tensor, version: int) -> dict[str, torch.Tensor]:
    """Return the tensors of ``image``, uint8 [num_bytes], as views that keep its memory alive.
    Raises WeightSyncError: the image is incomplete, or has another version."""
    try:
        return _views(image, version)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise WeightSyncError(
            f"version {version}: not a complete safetensors image: {error}"
        ) from error


def _views(image: torch.Tensor, version: int) -> dict[str, torch.Tensor]:
    num_bytes = image.numel()
    text_bytes = int.from_bytes(_to_bytes(image[:_LENGTH_BYTES]), "little")
    data_start = _LENGTH_BYTES + text_bytes
    if num_bytes < _LENGTH_BYTES or data_start > num_bytes:
        raise ValueError(f"a header of {text_bytes} bytes in an image of {num_bytes}")
    entries: dict[str, Any] = json.loads(_to_bytes(image[_LENGTH_BYTES:data_start]))
    found = entries.pop("__metadata__", {}).get(_VERSION_KEY)
    if found != str(version):
        raise WeightSyncError(f"version {version} was requested, the image is of version {found}")
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        start, end = (data_start + offset for offset in entry["data_offsets"])
        if end > num_bytes:
            raise ValueError(f"{name} ends at {end}, the image at {num_bytes}")
        tensors[name] = image[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def _to_bytes(image: torch.Tensor) -> bytes:
    return bytes(image.numpy())
