"""Makes a policy with experts (Qwen3-MoE) of the embedded policy of alphabet sort.

    python -m torchtitan_rl.experiments.alphabet_sort_moe.upcycle [--output-dir DIR]

Each expert begins as the feed-forward network of its layer with some noise, and gates are random
(sparse upcycling, Komatsuzaki et al. 2022, 2212.05055). The weights of a token's experts add up to
1, so without the noise the policy would be the dense one exactly. By default this replaces the
policy in this package.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR as DENSE_DIR

POLICY_DIR = Path(__file__).parent / "policy"


@dataclass(frozen=True, kw_only=True)
class Upcycle:
    """Options of this program."""

    output_dir: Path = POLICY_DIR
    num_experts: int = 4
    experts_per_token: int = 2
    noise: float = 0.1  # of an expert's weights, relative to their standard deviation
    gate_std: float = 0.05
    seed: int = 0


def upcycle(options: Upcycle) -> None:
    """Write the policy (bfloat16)."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(options.seed)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for name, dense in load_file(DENSE_DIR / "model.safetensors").items():
        prefix, is_ffn, projection = name.partition(".mlp.")
        if not is_ffn:
            tensors[name] = dense
            continue
        for expert in range(options.num_experts):
            noisy = dense + options.noise * dense.float().std() * normal(dense)
            tensors[f"{prefix}.mlp.experts.{expert}.{projection}"] = noisy.to(dense.dtype)
        if projection == "gate_proj.weight":
            gate = options.gate_std * normal(dense[: options.num_experts])
            tensors[f"{prefix}.mlp.gate.weight"] = gate.to(dense.dtype)
    config = json.loads((DENSE_DIR / "config.json").read_text())
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": config["intermediate_size"],
        "num_experts": options.num_experts,
        "num_experts_per_tok": options.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    shutil.copytree(DENSE_DIR, options.output_dir, dirs_exist_ok=True)
    (options.output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, options.output_dir / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    upcycle(tyro.cli(Upcycle, description=__doc__))
