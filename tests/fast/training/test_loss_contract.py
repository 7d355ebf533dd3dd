"""A loss of one's own is tried on made tokens; the example of the documentation passes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import (
    LossOutput,
    LossTokens,
    StepTotals,
    loss_problem,
    policy_loss,
)

CONFIG = LossConfig(kl_coefficient=0.1)


def reinforce(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
    tokens = tokens.cleaned()
    terms_T = tokens.advantages_T * tokens.logprobs_T
    sums = {"own/seen": tokens.trained_T.sum().float()}
    return LossOutput(loss=-terms_T.sum() / totals.num_tokens, sums=sums, maxima={})


def changed(**fields: Any) -> Any:
    """`reinforce` with another answer."""

    def function(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
        output = reinforce(tokens, totals=totals, config=config)
        return replace(output, **{name: make(tokens, output) for name, make in fields.items()})

    return function


def without_maxima(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
    return replace(policy_loss(tokens, totals=totals, config=config), maxima={})


def only_positional(tokens: LossTokens) -> LossOutput:
    return policy_loss(tokens, totals=StepTotals(num_tokens=1, num_sequences=1), config=CONFIG)


def reads_everything(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
    loss = (tokens.advantages_T * tokens.logprobs_T).sum() / totals.num_tokens
    return LossOutput(loss=loss, sums={}, maxima={})


def test_the_policy_loss_and_a_loss_of_ten_lines_keep_the_contract():
    assert loss_problem(policy_loss, CONFIG, 1) is None
    assert loss_problem(reinforce, CONFIG, 1) is None


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (only_positional, "fails .*TypeError.* unexpected keyword"),
        (lambda tokens, *, totals, config: tokens.logprobs_T.sum(), "returned a Tensor"),
        (changed(loss=lambda tokens, output: tokens.logprobs_T), "no scalar"),
        (changed(loss=lambda tokens, output: output.loss.detach()), "no scalar"),
        (reads_everything, "read nothing where trained_T is False"),
        (changed(loss=lambda tokens, output: output.loss * torch.rand(())), "nothing at random"),
        (
            changed(loss=lambda tokens, output: output.loss / tokens.trained_T.sum().clamp_min(1)),
            "losses of parts add up to",
        ),
        (without_maxima, "return both, or neither"),
        (changed(sums=lambda tokens, output: {"mine": output.loss.detach()}), "begin .* own/"),
        (changed(sums=lambda tokens, output: {"own/loss": output.loss}), "detached"),
        (changed(sums=lambda tokens, output: {"own/max": tokens.logprobs_T.max()}), "detached"),
        (
            changed(sums=lambda tokens, output: {"own/share": tokens.trained_T.float().mean()}),
            "do not add up",
        ),
        (
            changed(maxima=lambda t, output: {f"own/{len(t.ages_T)}": output.loss.detach()}),
            "other names",
        ),
    ],
)
def test_a_loss_that_breaks_the_contract_is_told_how(function: Any, problem: str):
    found = loss_problem(function, CONFIG, 1)
    assert found is not None
    assert re.search(problem, found)
    assert "\n" not in found


@pytest.mark.parametrize("name", ["reference_T", "before_T"])
def test_a_loss_is_tried_with_what_the_run_will_give_it(name: str):
    anchored = replace(CONFIG, proximal_policy="recomputed", importance_weight="token")

    def needs(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput:
        assert getattr(tokens, name) is not None
        return reinforce(tokens, totals=totals, config=config)

    assert loss_problem(needs, anchored, 2) is None
    found = loss_problem(needs, replace(anchored, kl_coefficient=0.0), 1)
    assert found is not None
    assert "AssertionError" in found
