"""Policies that take images: engines and trainer, judged by `transformers` and fresh engines."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real.image_policies import (
    hf_image_logprobs,
    image_policy,
    torchvision_environment,
)
from tests.real.image_scenarios import PULL_STEP
from tests.real.models import hf_tensors
from tests.real.runs import run_module
from tests.real.trainer_helpers import trainer
from tests.support.images import picture
from torchtitan_rl.images import image_reader, place_images
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Completion, Episode, GenerationRequest, VersionRun

pytestmark = pytest.mark.soak
TOLERANCE = 1e-5
PAD = 268  # <|image_pad|>
ROW = 160


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for version in range(3):
        image_policy(root / f"v{version}", seed=version)
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> dict[str, Any]:
    return run("engines", root)


@pytest.fixture(scope="module")
def asked(root: Path) -> dict[str, Any]:
    return run("endpoint", root)


def run(mode: str, root: Path) -> dict[str, Any]:
    environment = torchvision_environment(root / "torchvision")
    run_module("tests.real.image_scenarios", mode, str(root), OMP_NUM_THREADS="1", **environment)
    found: dict[str, Any] = pickle.loads((root / f"{mode}.pickle").read_bytes())
    return found


def errors(
    path: Path, request: GenerationRequest, done: Completion, start: int = 0, end: int | None = None
) -> float:
    prompt = request.prompt_token_ids
    expected = hf_image_logprobs(path, prompt + done.token_ids, request.images)[len(prompt) - 1 :]
    pairs = list(zip(expected, done.logprobs, strict=True))[start:end]
    return max(abs(mine - theirs) for mine, theirs in pairs)


def test_logprobs_are_those_of_transformers(seen: dict[str, Any], root: Path) -> None:
    for request in seen["requests"]:
        if request.request_id != "samples":  # whose logits are biased
            assert errors(root / "v0", request, seen["first"][request.request_id]) < TOLERANCE
            assert errors(root / "v0", request, seen["cached"][request.request_id]) < TOLERANCE


def test_cached_prefixes_are_keyed_by_the_pictures(seen: dict[str, Any]) -> None:
    """The prompts of ``greedy`` and ``other`` have the same tokens. Their common blocks end within
    the second picture."""
    requests = {one.request_id: one for one in seen["requests"]}
    assert requests["greedy"].prompt_token_ids == requests["other"].prompt_token_ids
    assert seen["cached"]["greedy"].metrics.cached_tokens >= 32
    first, other = (seen["first"][name].logprobs for name in ("greedy", "other"))
    assert np.abs(np.subtract(first, other)).max() > 0.01


def test_a_request_goes_through_a_pull_of_decoder_and_tower(
    seen: dict[str, Any], root: Path
) -> None:
    for request in seen["requests"]:
        if (done := seen["mixed"].get(request.request_id)) is None:
            continue
        assert done.version_runs == (VersionRun(0, 0), VersionRun(PULL_STEP, 1))
        assert errors(root / "v0", request, done, 0, PULL_STEP) < TOLERANCE
        assert errors(root / "v1", request, done, PULL_STEP) < TOLERANCE
        assert errors(root / "v0", request, done, PULL_STEP) > 0.05


def test_an_engine_after_a_pull_equals_a_fresh_one(seen: dict[str, Any]) -> None:
    for name, fresh in seen["fresh"].items():
        assert seen["pulled"][name].token_ids == fresh.token_ids
        assert seen["pulled"][name].logprobs == fresh.logprobs


def test_a_version_without_the_tower_keeps_the_tower(seen: dict[str, Any], root: Path) -> None:
    """After a pull of version 2: its tower with the decoder of version 1."""
    from safetensors.torch import save_file

    mixed = root / "mixed"
    image_policy(mixed, seed=1)
    tower = {n: t for n, t in hf_tensors(root / "v2").items() if n.startswith("visual.")}
    save_file(hf_tensors(mixed) | tower, mixed / "model.safetensors", metadata={"format": "pt"})
    for request in seen["requests"]:
        if request.request_id != "samples":
            assert errors(mixed, request, seen["frozen"][request.request_id]) < TOLERANCE


def test_a_sampled_placeholder_changes_no_picture(seen: dict[str, Any], root: Path) -> None:
    """In a later prompt on an engine, and among the sampled tokens of an episode."""
    requests = {one.request_id: one for one in seen["requests"]}
    assert PAD in requests["again"].prompt_token_ids[-3:]
    assert errors(root / "v0", requests["again"], seen["first"]["again"]) < TOLERANCE
    done = seen["first"]["samples"]
    assert PAD in done.token_ids[:-1]
    with trainer(root / "v0", max_episode_tokens=ROW, max_tokens_per_microbatch=2 * ROW) as one:
        batch = batch_of([episode(requests["samples"], done)])
        found = one.logprobs(batch)[1:]
    whole = requests["samples"].prompt_token_ids + done.token_ids
    expected = hf_image_logprobs(root / "v0", whole, requests["samples"].images)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_requests_that_are_cut_and_go_on_equal_whole_ones(seen: dict[str, Any]) -> None:
    for whole, *pieces in seen["cut"].values():
        assert len(pieces) > 2
        for done in pieces:
            assert done.token_ids == whole.token_ids
            np.testing.assert_allclose(done.logprobs, whole.logprobs, atol=TOLERANCE)


def test_wrong_images_are_refused_alone(seen: dict[str, Any]) -> None:
    assert set(seen["refused"]) == {
        *("outside", "overlap", "no placeholders", "another size", "no picture"),
    }
    assert all("images" in error or "image" in error for error in seen["refused"].values())


def test_rollouts_and_trainer_have_the_same_logprobs(seen: dict[str, Any], root: Path) -> None:
    chosen = [one for one in seen["requests"] if one.request_id != "samples"]
    episodes = [episode(one, seen["first"][one.request_id]) for one in chosen]
    for share_prefixes in (True, False):
        with trainer(
            root / "v0",
            max_episode_tokens=ROW,
            max_tokens_per_microbatch=2 * ROW,
            share_prefixes=share_prefixes,
        ) as one:
            batch = batch_of(episodes)
            found = one.logprobs(batch)
        difference = np.abs(found - batch.logprobs)[batch.loss_mask]
        assert difference.max() < TOLERANCE


def test_the_endpoint_reads_pictures_as_rollouts_do(asked: dict[str, Any], root: Path) -> None:
    from transformers import AutoTokenizer

    assert [status for status, _ in asked["answers"]] == [200] * 6
    env = MessageTokenEnv(
        AskingEnv(asked["content"]),
        make_renderer(AutoTokenizer.from_pretrained(root / "v0"), kind="chatml"),
    )
    expected = asyncio.run(env.reset())
    with_images = [one for one in asked["requests"] if one.images]
    assert len(with_images) == 5
    for request in with_images:
        assert request.prompt_token_ids == expected.prompt_token_ids
        assert request.images == expected.images
    assert asked["tokenized"][1]["tokens"] == list(expected.prompt_token_ids)


def test_attacks_on_the_endpoint_are_one_clear_400_each(asked: dict[str, Any]) -> None:
    assert len(asked["refused"]) > 20
    for name, (status, answer) in asked["refused"].items():
        assert status == 400, (name, answer)
        assert answer["error"]["message"], name
        assert "Traceback" not in str(answer), name
        assert "/work" not in str(answer), name
    assert len(asked["requests"]) == 6


class AskingEnv:
    def __init__(self, content: list[Any]) -> None:
        self._content = content

    async def reset(self) -> MessageObservation:
        return MessageObservation(messages=[{"role": "user", "content": self._content}])

    async def step(self, message: dict[str, Any]) -> Any: ...

    async def finish(self, status: Any) -> Any: ...

    async def close(self) -> None: ...


def episode(request: GenerationRequest, done: Completion) -> Episode:
    num_prompt, num_sampled = len(request.prompt_token_ids), len(done.token_ids)
    zeros = (0.0,) * num_prompt
    return Episode(
        rollout_id=request.request_id,
        group_id=request.request_id,
        token_ids=request.prompt_token_ids + done.token_ids,
        loss_mask=(False,) * num_prompt + (True,) * num_sampled,
        logprobs=zeros + done.logprobs,
        advantages=zeros + (1.0,) * num_sampled,
        versions=(-1,) * num_prompt + (0,) * num_sampled,
        images=request.images,
    )


def batch_of(episodes: list[Episode]) -> Any:
    batch = pack_episodes(episodes, row_len=ROW, temperature=1.0).batch
    assert batch is not None
    return batch


def made_episodes(path: Path) -> list[Episode]:
    reader = image_reader(path)
    assert reader is not None
    images = [reader.read(picture(60 + 28 * n, 84, seed=n)) for n in range(3)]
    made = []
    for number in range(6):
        prompt, placed = place_images(
            (40, 41, 265, PAD, 266, 50 + number // 2), PAD, [images[number // 2]]
        )
        request = GenerationRequest(
            request_id=f"{number}",
            prompt_token_ids=prompt,
            sampling=None,
            images=placed,  # type: ignore[arg-type]
        )
        tokens = tuple(60 + (number * 7 + n) % 40 for n in range(9))
        done = Completion(
            request_id="",
            token_ids=tokens,
            logprobs=(-5.0,) * 9,
            version_runs=(),
            finish_reason="stop",  # type: ignore[arg-type]
        )
        made.append(episode(request, done))
    text = replace(made[0], rollout_id="text", images=(), token_ids=(7,) * len(made[0].token_ids))
    return [*made, text]


@pytest.mark.parametrize("trains", [False, True])
def test_a_step_trains_the_tower_or_leaves_it_out(trains: bool, root: Path, tmp_path: Path) -> None:
    before = hf_tensors(root / "v0")
    fields = {"max_episode_tokens": ROW, "max_tokens_per_microbatch": ROW}
    with trainer(root / "v0", train_vision_tower=trains, **fields) as one:
        one.train_step(batch_of(made_episodes(root / "v0")))
        version = dict(one.hf_state_dict())
        one.export_hf(tmp_path / "policy")
    exported = hf_tensors(tmp_path / "policy")
    assert exported.keys() == before.keys()
    assert version.keys() == {n for n in before if trains or not n.startswith("visual.")}
    changed = {n for n in before if not np.array_equal(before[n], exported[n])}
    assert changed == version.keys()
