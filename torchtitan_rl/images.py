"""Images in prompts: reading them safely, their places among the tokens, and their positions.

An image is read once, by `ImageReader`, and stored as the policy sees it: a PNG file in RGB, scaled
to whole patches within the pixel limits of the checkpoint, from which every part of the system
computes. The tokens of an image are placeholders in the prompt, at recorded places
(`PromptImage.start`): a placeholder that a policy samples is a token like any other.

Shapes: L tokens of a sequence, P patches of an image, K values of a patch.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_IMAGE_BYTES = 20 << 20
MAX_IMAGES = 16  # of a request to the endpoint
MAX_IMAGE_PIXELS = 1 << 24  # of an image before it is scaled
_MAX_SCANS = 64  # of a JPEG file; each of a few bytes may take 50 ms, and cameras write about ten
PREPROCESSOR_CONFIG = "preprocessor_config.json"
_FORMATS = ("PNG", "JPEG", "WEBP", "MPO")  # MPO: JPEG files of telephones
_DATA_URL_TYPES = ("image/png", "image/jpeg", "image/webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImage:
    """An image in a prompt. Its tokens, a grid of ``rows`` x ``columns``, begin at index ``start``.

    ``data`` is a PNG file with the pixels that the policy sees.
    """

    start: int
    rows: int
    columns: int
    data: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def digest(self) -> str:
        """The file's SHA-256 in hexadecimal. Images with the same digest are the same."""
        return sha256(self.data).hexdigest()


class ImageReader:
    """Reads images for the policy in ``folder``. May be called from any thread. Raises ValueError
    or OSError: the folder has no valid ``preprocessor_config.json``."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._side = self._processor.patch_size * self._processor.merge_size  # of a token's pixels

    @property
    def merge_size(self) -> int:
        """The patches along each side of a token."""
        return int(self._processor.merge_size)

    def read(self, source: Any, *, max_pixels: int | None = None) -> PromptImage:
        """Read an image (``PIL.Image``, path or bytes of a PNG, JPEG or WebP file) and scale it.

        ``max_pixels``: a lower limit than the checkpoint's. The result's ``start`` is 0.

        Raises:
            ValueError: it is no such image, is damaged, animated, too large, or more than 200 times
                as long as wide.
        """
        from PIL import Image
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        image = source if isinstance(source, Image.Image) else _opened(_contents(source))
        image = _decoded(image)
        size = self._processor.size
        height, width = smart_resize(
            image.height,
            image.width,
            factor=self._side,
            min_pixels=size.shortest_edge,
            max_pixels=max(
                size.shortest_edge, min(max_pixels or size.longest_edge, size.longest_edge)
            ),
        )
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        return PromptImage(
            start=0, rows=height // self._side, columns=width // self._side, data=file.getvalue()
        )

    def patches(self, data: bytes) -> npt.NDArray[np.float32]:
        """Return the patches [P, K] of a stored image, as the vision tower takes them: token by
        token."""
        patches: npt.NDArray[np.float32] = self._processor(
            images=[_opened(data)], do_resize=False, return_tensors="np"
        )["pixel_values"]
        return patches

    def no_patches(self) -> npt.NDArray[np.float32]:
        """Return the patches of an empty image of one token."""
        side, times = self._processor.patch_size, self._processor.temporal_patch_size
        return np.zeros((self.merge_size**2, 3 * times * side**2), dtype=np.float32)


@functools.lru_cache(maxsize=8)
def image_reader(folder: Path) -> ImageReader | None:
    """Return the reader for a policy's folder; None if the policy takes no images."""
    return ImageReader(folder) if (folder / PREPROCESSOR_CONFIG).is_file() else None


def data_of_url(url: object) -> bytes:
    """Return the bytes of a data URL (``data:image/png;base64,...``). Raises ValueError: it is no
    data URL of a PNG, JPEG or WebP image, or too long."""
    head, _, encoded = url.partition(",") if isinstance(url, str) else ("", "", "")
    kind = head.lower().removeprefix("data:").removesuffix(";base64")
    if head.lower() != f"data:{kind};base64":
        raise ValueError(
            "give images as data URLs (data:image/png;base64,...); nothing is fetched from other "
            "addresses"
        )
    if kind not in _DATA_URL_TYPES:
        raise ValueError(f"image type {kind[:40]!r}: give {', '.join(_DATA_URL_TYPES)}")
    if len(encoded) > 4 * (MAX_IMAGE_BYTES // 3 + 1):
        raise ValueError(f"an image has more than {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image's data URL is no valid base64: {error}") from error


def _contents(source: Any) -> bytes:
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        try:
            with path.open("rb") as file:
                source = file.read(MAX_IMAGE_BYTES + 1)  # devices say that they have no bytes
        except OSError as error:
            raise ValueError(f"image {path} cannot be read: {error}") from error
    if not isinstance(source, bytes):
        raise ValueError(f"an image is a PIL.Image, a path or bytes, not {type(source).__name__}")
    if len(source) > MAX_IMAGE_BYTES:
        raise ValueError(f"an image has more than {MAX_IMAGE_BYTES} bytes")
    return source


def _opened(data: bytes) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f"an image has more than {MAX_IMAGE_PIXELS} pixels") from error
    except Exception as error:  # Pillow's readers raise errors of many types
        raise ValueError("an image is no valid PNG, JPEG or WebP file") from error
    if image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > _MAX_SCANS:
        raise ValueError(f"a JPEG image has more than {_MAX_SCANS} scans: save it again")
    return image


def _decoded(image: Any) -> Any:
    """Return the whole image in RGB; transparent parts become white."""
    from PIL import Image, ImageOps

    if not 0 < image.width * image.height <= MAX_IMAGE_PIXELS:
        raise ValueError(
            f"an image has {image.width} x {image.height} pixels: give 1 to {MAX_IMAGE_PIXELS} "
            "in all"
        )
    try:
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise ValueError("an image is animated: give one picture")
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # Pillow would cut values off at 255
            image = image.point(lambda value: value * (1 / 256)).convert("L")
        if image.mode in ("I", "F"):
            raise ValueError(f"an image has values of mode {image.mode}: give 8 or 16 bits each")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "WHITE")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except ValueError:
        raise
    except Exception as error:
        raise ValueError("an image is damaged or truncated") from error


def place_images(
    token_ids: Sequence[int], placeholder: int, images: Iterable[PromptImage], *, first: int = 0
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Replace each placeholder token from index ``first`` on by as many as its image has tokens.
    Return the tokens, and the images with their places.

    >>> image = PromptImage(start=0, rows=1, columns=2, data=b"")
    >>> tokens, (placed,) = place_images([5, 9, 6], 9, [image])
    >>> tokens, placed.start
    ((5, 9, 9, 6), 1)

    Raises:
        ValueError: there are more or fewer placeholders than images.
    """
    placed: list[PromptImage] = []
    tokens = list(token_ids[:first])
    rest = list(images)
    for token in token_ids[first:]:
        if token == placeholder and len(placed) < len(rest):
            image = replace(rest[len(placed)], start=len(tokens))
            placed.append(image)
            tokens += [placeholder] * image.num_tokens
        elif token == placeholder:
            raise ValueError(f"the chat template has more places than the {len(rest)} images")
        else:
            tokens.append(token)
    if len(placed) < len(rest):
        raise ValueError(f"the chat template has places for {len(placed)} of {len(rest)} images")
    return tuple(tokens), tuple(placed)


def images_error(
    images: Sequence[PromptImage], token_ids: Sequence[int], placeholder: int | None
) -> str:
    """Return the error in a prompt's images; empty if they are valid. ``placeholder`` None: the
    policy takes no images."""
    if images and placeholder is None:
        return "images: this policy takes text only; leave them out"
    end = 0
    for image in images:
        if image.start < end or image.end > len(token_ids) or image.num_tokens < 1:
            return (
                f"images: tokens {image.start} to {image.end} are outside of the prompt, or overlap"
            )
        if any(token != placeholder for token in token_ids[image.start : image.end]):
            return f"images: tokens {image.start} to {image.end} are not all {placeholder}"
        end = image.end
    return ""


def recorded_images_error(images: Sequence[PromptImage], token_ids: Sequence[int]) -> str:
    """Return the error in a recorded prompt's images; empty if they are valid."""
    first = images[0].start if images else 0
    return images_error(images, token_ids, token_ids[first] if first < len(token_ids) else None)


def rope_positions(length: int, images: Iterable[PromptImage]) -> npt.NDArray[np.int64]:
    """Return the positions [L, 3] (time, row, column) for rotary embeddings of a sequence.

    The positions of a text's token are equal and increase by one. An image has one time; its rows
    and columns count from there, and the text after it continues after the largest of them
    (multimodal RoPE, Wang et al. 2024, 2409.12191).
    """
    positions_L3 = np.empty((length, 3), dtype=np.int64)
    done = following = 0
    for image in images:
        text = np.arange(image.start - done) + following
        positions_L3[done : image.start] = text[:, None]
        base = following + len(text)
        row, column = np.divmod(np.arange(image.num_tokens), image.columns)
        positions_L3[image.start : image.end] = base + np.stack([0 * row, row, column], axis=1)
        done, following = image.end, base + max(image.rows, image.columns)
    positions_L3[done:] = (np.arange(length - done) + following)[:, None]
    return positions_L3


def images_before(images: Sequence[PromptImage], end: int) -> tuple[PromptImage, ...]:
    return tuple(one for one in images if one.start < end)


def described(image: PromptImage) -> Mapping[str, Any]:
    """Return a record of an image without its pixels, in JSON types."""
    return {
        "start": image.start,
        "rows": image.rows,
        "columns": image.columns,
        "sha256": image.digest,
    }
