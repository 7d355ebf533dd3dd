"""Tiny random Qwen2.5-VL checkpoints, and torchvision for the tests with images."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.real.models import VOCAB_SIZE
from tests.support.images import write_image_files
from torchtitan_rl.images import PromptImage, image_reader

_NAMES = """
if not _has_ops():  # PyPI's build is for CUDA: the names that importing torchvision needs
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def torchvision_environment(folder: Path) -> dict[str, str]:
    """Variables of processes that import torchvision, which vLLM needs for policies with images.

    Where the CPU build is not installed (it is not on PyPI), the Python part of PyPI's build is
    put into ``folder``. No test needs one of its kernels.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    if not (folder / "torchvision").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder), "torchvision==0.28.0"], check=True)
        with (folder / "torchvision" / "extension.py").open("a") as extension:
            extension.write(_NAMES)
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def image_policy(path: Path, *, seed: int = 0, std: float = 0.1, tied: bool = True) -> Path:
    """Write a random checkpoint with its tokenizer to the directory ``path`` and return it."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = write_image_files(path)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    image, video, start, end = tokenizer.convert_tokens_to_ids(list(names))
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 1024,
            "initializer_range": std,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
            "initializer_range": std,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zero otherwise
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path)
    return path


def hf_image_logprobs(
    path: Path, token_ids: Sequence[int], images: Sequence[PromptImage]
) -> list[float]:
    """Logprob of each token after the first, by `transformers` in float32. Features of images are
    at their recorded places, whatever other placeholders there are."""
    import torch

    reader, model = image_reader(path), _hf_model(path)
    assert reader is not None
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        embedded_1LD = model.get_input_embeddings()(ids)
        types = torch.zeros_like(ids)
        grids = [[1, one.rows * 2, one.columns * 2] for one in images]
        for one, grid in zip(images, grids, strict=True):
            patches_PK = torch.from_numpy(reader.patches(one.data))
            found = model.model.visual(patches_PK, grid_thw=torch.tensor([grid])).pooler_output
            embedded_1LD[0, one.start : one.end] = found
            types[0, one.start : one.end] = 1
        positions, _ = model.model.get_rope_index(
            ids, types, image_grid_thw=torch.tensor(grids) if grids else None
        )
        logits_LV = model(inputs_embeds=embedded_1LD, position_ids=positions).logits[0]
    rows = logits_LV.log_softmax(-1)[:-1]
    return [float(row[token]) for row, token in zip(rows, token_ids[1:], strict=True)]


@cache
def _hf_model(path: Path) -> Any:
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
