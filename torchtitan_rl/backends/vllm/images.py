"""Prompts with images for vLLM's engine.

vLLM would find the images' tokens by the placeholder token, which a policy may also sample. So vLLM
only computes the pixels; the tokens and their places are the request's own. Prefix blocks and
outputs of the vision tower are keyed by the images' digests.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

from torchtitan_rl.types import GenerationRequest


def keep_pixels() -> None:
    """Let the model runner keep the pixels of images that a cached prefix covers.

    vLLM does not give them to the runner, so a step failed if such a request was preempted, or
    computed again after a pull. Nothing is copied: scheduler and runner are in one process.
    """
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features


def make_prompt(renderer: Any, request: GenerationRequest, salt: str | None) -> Any:
    """Return the request's prompt in vLLM's form. ``renderer`` is that of vLLM's engine. Raises
    ValueError: an image does not have the number of tokens that it says."""
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    token_ids = list(request.prompt_token_ids)
    if not request.images:
        return tokens_input(token_ids, cache_salt=salt)
    items = [
        _computed(renderer, token_ids[one.start], one.data, one.num_tokens)
        for one in request.images
    ]
    return mm_input(
        token_ids,
        MultiModalKwargsItems({"image": items}),
        {"image": [one.digest for one in request.images]},
        {"image": [PlaceholderRange(one.start, one.num_tokens) for one in request.images]},
        cache_salt=salt,
    )


@lru_cache(maxsize=8)  # siblings have the same images; pixels take 24 bytes each
def _computed(renderer: Any, placeholder: int, data: bytes, num_tokens: int) -> Any:
    from PIL import Image

    prompt = {
        "prompt_token_ids": [placeholder],
        "multi_modal_data": {"image": Image.open(io.BytesIO(data), formats=("PNG",))},
    }
    made = renderer.process_for_engine(prompt, arrival_time=0.0)
    (found,) = made["mm_placeholders"]["image"]
    if found.length != num_tokens:
        raise ValueError(
            f"images: one has {found.length} tokens, and the request says {num_tokens}: read it "
            "with the policy's own ImageReader"
        )
    (item,) = made["mm_kwargs"]["image"]
    return item
