"""The vision tower of policies that take images: transformers' own module inside our model.

Features of images replace the embeddings of the image's tokens at recorded places, not where the
placeholder token is: a policy may sample that token.

Shapes: B rows, L tokens, D model dimension; P patches of K values; F features, one for each token
of an image, of all images of a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_rl.images import ImageReader
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.trees import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """The images of a forward pass. ``places_F`` index the flattened tokens [B * L], and
    ``features_F`` the tower's output for each of them. Without images, the tower computes an empty
    one, so that every rank has gradients of the tower."""

    patches_PK: torch.Tensor
    grids_I3: torch.Tensor  # the patches of each image: times, rows, columns
    places_F: torch.Tensor
    features_F: torch.Tensor


def rope_positions(part: Microbatch, reader: ImageReader | None) -> npt.NDArray[np.int64]:
    """Return the positions for rotary embeddings: [T, 3] for a policy that takes images, otherwise
    (without a ``reader``) [T]."""
    if reader is None:
        return part.position_ids_T
    if part.positions_T3 is None:
        return np.stack([part.position_ids_T] * 3, axis=1)
    return part.positions_T3


def image_inputs(
    batch: TrainingBatch, part: Microbatch, reader: ImageReader | None, device: torch.device
) -> ImageInputs | None:
    """Return the images of a microbatch. Each is computed once, however often it occurs. Without
    a ``reader``, the policy takes text only."""
    if reader is None:
        return None
    of_tokens_T = part.features_T
    if of_tokens_T is None:
        of_tokens_T = np.full_like(part.token_ids_T, -1)
    places_F = np.flatnonzero(of_tokens_T >= 0)
    ends = np.cumsum([one.num_tokens for one in batch.images], dtype=np.int64)
    used, number_F = np.unique(
        np.searchsorted(ends, of_tokens_T[places_F], side="right"), return_inverse=True
    )
    images = [batch.images[number] for number in used]
    sizes = np.array([one.num_tokens for one in images], dtype=np.int64)
    # From an index into the features of the whole batch to one into those of the used images.
    shifts = (np.cumsum(sizes) - sizes) - (ends[used] - sizes)
    merge = reader.merge_size
    grids = [(1, one.rows * merge, one.columns * merge) for one in images] or [(1, merge, merge)]
    patches = [reader.patches(one.data) for one in images] or [reader.no_patches()]
    return ImageInputs(
        patches_PK=torch.from_numpy(np.concatenate(patches)).to(device),
        grids_I3=torch.tensor(grids, device=device),
        places_F=torch.from_numpy(places_F).to(device),
        features_F=torch.from_numpy(of_tokens_T[places_F] + shifts[number_F]).to(device),
    )


def with_images(h_BLD: torch.Tensor, tower: Any, images: ImageInputs) -> torch.Tensor:
    """Replace the embeddings of the images' tokens by the tower's features."""
    is_trained = any(one.requires_grad for one in tower.parameters())
    if not is_trained and not len(images.places_F):
        return h_BLD
    with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
        found_FD = tower(images.patches_PK, grid_thw=images.grids_I3).pooler_output
    flat = h_BLD.flatten(0, 1).index_copy(
        0, images.places_F, found_FD[images.features_F].to(h_BLD.dtype)
    )
    if not len(images.places_F):
        flat = flat + 0.0 * found_FD.sum()
    return flat.view(h_BLD.shape)


def make_tower(config: Mapping[str, Any]) -> Any:
    """Build the tower of a ``vision_config``; its weights come from the checkpoint."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    made = Qwen2_5_VLVisionConfig(**config)
    return Qwen2_5_VisionTransformerPretrainedModel._from_config(
        made, attn_implementation="sdpa", dtype=torch.float32
    )


def init_tower_buffers(tower: Any, device: torch.device) -> None:
    """Compute the frequencies of the tower's rotary embeddings, which no checkpoint has."""
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)
