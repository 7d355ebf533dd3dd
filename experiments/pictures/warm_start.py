"""Makes a small policy for the pictures: a Qwen2.5-VL that answers with any of the colours.

    python -m torchtitan_rl.experiments.pictures.warm_start [--output-dir DIR]

writes a Hugging Face directory, by default the one that ``config.py`` trains. Its demonstrations
are the question without a picture, and a colour at random: that pictures show the colour is left to
reinforcement learning.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.pictures.task import COLOURS, QUESTION
from torchtitan_rl.experiments.tiny_policy import (
    ModelSize,
    WarmStart,
    build_word_backend,
    demonstration,
    warm_start,
    with_chat_template,
)

_SIZE = ModelSize(hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, head_dim=32)
_VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_CHATML = (  # with parts of messages
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{{ part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 4 * 28 * 28,
    "max_pixels": 64 * 28 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
# Line breaks; a word with the space before it; other signs; other white space.
_PIECE = r"\n+| ?[a-z]+| ?[^\sa-z]+|\s"
_COVERED = "\n".join(["system", "user", "assistant", QUESTION, *COLOURS])


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = Path("outputs/pictures_policy")
    right_steps: int = 0
    careless_steps: int = 100
    decay_steps: int = 50
    row_len: int = 32


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        turn = [{"role": "user", "content": QUESTION}], rng.choice(list(COLOURS))
        return demonstration(f"{number}", [turn], renderer=renderer, tokenizer=tokenizer)

    warm_start(config, tokenizer, _SIZE, demonstrate, write=write_untrained)


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy."""
    tokenizer = with_chat_template(build_word_backend(_COVERED, piece=_PIECE), _CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_VISION_TOKENS)})
    return tokenizer


def write_untrained(path: Path, tokenizer: Any, size: ModelSize, *, seed: int) -> None:
    """Write a Hugging Face directory with random weights, tokenizer and options of images."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    start, image, end, video = tokenizer.convert_tokens_to_ids(list(_VISION_TOKENS))
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": size.hidden_size,
                "intermediate_size": size.intermediate_size,
                "num_hidden_layers": size.num_layers,
                "num_attention_heads": size.num_heads,
                "num_key_value_heads": size.num_heads // 2,
                "max_position_embeddings": size.max_positions,
                "initializer_range": 0.06,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [4, 6, 6],
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": size.hidden_size,
                "fullatt_block_indexes": [1],
                "initializer_range": 0.06,
            },
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
