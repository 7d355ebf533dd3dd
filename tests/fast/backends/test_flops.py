"""The arithmetic of a step, and peaks of devices."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from torchtitan_rl.backends.titan.flops import PolicySizes, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA L4", None),
    ],
)
@pytest.mark.parametrize("has_lspci", [True, False])
def test_an_unknown_card_has_no_peak_instead_of_an_a100s(
    name: str, peak: float | None, has_lspci: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lspci(*_: object, **__: object) -> SimpleNamespace:
        if not has_lspci:
            raise FileNotFoundError
        return SimpleNamespace(stdout=f"01:00.0 3D controller: {name}\n")

    monkeypatch.setattr(subprocess, "run", lspci)
    assert peak_flops(name) == peak


def test_a_token_costs_six_flops_a_weight_and_attention_by_what_it_sees() -> None:
    sizes = PolicySizes(layer_parameters=100, head_parameters=10, attention_width=4)
    # 7 tokens, logits of 3 of them; 7 tokens of one document see 28 pairs.
    assert sizes.step_flops(num_tokens=7, num_logits=3, num_pairs=28) == (
        6 * (7 * 100 + 3 * 10) + 3 * 4 * 28 * 4
    )


def test_a_frozen_weight_gets_no_gradient() -> None:
    sizes = PolicySizes(
        layer_parameters=100, head_parameters=10, attention_width=4, frozen_parameters=98
    )
    assert sizes.step_flops(num_tokens=7, num_logits=3, num_pairs=28) == (
        7 * (4 * 98 + 6 * 2) + 3 * 4 * 10 + 3 * 4 * 28 * 4
    )
