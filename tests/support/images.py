"""The files of a policy that takes images, without its weights, and pictures for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.real.models import tiny_tokenizer
from torchtitan_rl.images import PromptImage

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # Qwen2.5-VL's, without its default system prompt
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 4 * 28 * 28,
    "max_pixels": 64 * 28 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}  # without means of colours, for which vLLM's processor and its model have other defaults


def write_image_files(path: Path) -> Any:
    """Write a tokenizer and the options of images to the directory ``path``; return the
    tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    tokenizer.name_or_path = str(path)
    return tokenizer


def picture(height: int, width: int, *, seed: int = 0) -> Any:
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def made_image(start: int, rows: int = 1, columns: int = 2, data: bytes = b"a") -> PromptImage:
    """An image that nothing decodes."""
    return PromptImage(start=start, rows=rows, columns=columns, data=data)
