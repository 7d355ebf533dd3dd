"""Images: hostile files, places among tokens, and what makes two of them the same."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.episodes import make_episode
from tests.support.images import PREPROCESSOR, file_of, made_image, picture, write_image_files
from tests.support.rollouts import PROBLEM
from tests.support.turns import rollout, turn
from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.generation.engine import EngineLimits, validate_request
from torchtitan_rl.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    ImageReader,
    PromptImage,
    data_of_url,
    image_reader,
    place_images,
    recorded_images_error,
    rope_positions,
)
from torchtitan_rl.observability.rollouts import rollout_from_json, rollout_to_json
from torchtitan_rl.rollout.env import WrongAnswerError
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.rollout.records import (
    RecordedRollout,
    restored_rollout,
    saved_rollout,
    turn_from_bytes,
    turn_to_bytes,
)
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.training.trees import sort_episodes
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    RolloutGroup,
    SamplingParams,
)

PAD = 9


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_image_files(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reader(tokenizer: Any) -> ImageReader:
    found = image_reader(Path(tokenizer.name_or_path))
    assert found is not None
    return found


def png_of(width: int, height: int) -> bytes:
    """The header of a PNG file that says it has this size, and no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def jpeg_of_many_scans(number: int) -> bytes:
    """A small file that takes long: its last scan is repeated."""
    whole = file_of(picture(30, 30), "JPEG", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + whole[last:end] * number + whole[end:]


@functools.cache
def hostile_files() -> dict[str, bytes]:
    small, whole = picture(30, 30), file_of(picture(60, 60))
    return {
        "empty": b"",
        "text": b"<svg/>",
        "a GIF": file_of(small, "GIF"),
        "a TIFF": file_of(small, "TIFF"),
        "truncated": whole[: len(whole) // 2],
        "header alone": png_of(60, 60),
        "a bomb": png_of(60_000, 60_000),
        "more pixels than allowed": png_of(MAX_IMAGE_PIXELS, 2),
        "animated PNG": file_of(small, save_all=True, append_images=[picture(30, 30, seed=1)]),
        "animated WebP": file_of(
            small, "WEBP", save_all=True, append_images=[picture(30, 30, seed=1)]
        ),
        "a line": file_of(picture(1, 300)),
        "too many bytes": bytes(MAX_IMAGE_BYTES + 1),
        "a JPEG of many scans": jpeg_of_many_scans(64),
    }


@pytest.mark.parametrize("name", hostile_files())
def test_a_hostile_file_is_one_clear_error(name: str, reader: ImageReader) -> None:
    with pytest.raises(ValueError, match=r"image|aspect ratio"):
        reader.read(hostile_files()[name])


def test_a_source_without_pixels_or_end_is_one_clear_error(reader: ImageReader) -> None:
    for source in (Image.new("RGB", (0, 5)), Image.new("F", (60, 60)), "/dev/zero"):
        with pytest.raises(ValueError, match="image"):
            reader.read(source)


def test_gray_values_of_16_bits_are_scaled_to_8(reader: ImageReader) -> None:
    gray = Image.fromarray(np.full((56, 56), 0x4080, dtype=np.uint16))
    for source in (gray, file_of(gray)):
        stored = Image.open(io.BytesIO(reader.read(source).data))
        assert stored.getpixel((5, 5)) == (0x40, 0x40, 0x40)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "file:///etc/passwd",
        "data:image/png,abc",
        "data:image/svg+xml;base64,AAAA",
        "data:text/html;base64,AAAA",
        "data:image/png;base64,@@@@",
        "data:image/png;base64," + "A" * (2 * MAX_IMAGE_BYTES),
        "data:",
        "",
        None,
        {"url": "data:"},
    ],
)
def test_only_data_urls_of_images_are_read(url: object) -> None:
    with pytest.raises(ValueError, match=r"data URL|image"):
        data_of_url(url)


def test_a_picture_is_stored_as_the_policy_sees_it(reader: ImageReader, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(file_of(picture(200, 333), "JPEG"))
    url = f"data:image/PNG;base64,{base64.b64encode(file_of(picture(60, 60))).decode()}"
    read = [
        reader.read(tmp_path / "a.jpg"),
        reader.read(picture(10, 10)),
        reader.read(picture(2000, 1000).convert("L")),
        reader.read(picture(60, 60).convert("RGBA")),
        reader.read(data_of_url(url)),
    ]
    assert [(one.rows, one.columns) for one in read] == [(6, 10), (2, 2), (11, 5), (2, 2), (2, 2)]
    for one in read:
        assert one.num_tokens * 28 * 28 <= PREPROCESSOR["max_pixels"]
        again = reader.read(one.data)
        assert again == one
        assert reader.patches(one.data).shape == (4 * one.num_tokens, 3 * 2 * 14 * 14)
    assert reader.read(picture(200, 333), max_pixels=10 * 28 * 28).num_tokens <= 10


def test_transparent_parts_are_white(reader: ImageReader) -> None:
    from PIL import Image

    clear = reader.read(Image.new("RGBA", (56, 56), (0, 0, 0, 0)))
    assert clear == reader.read(Image.new("RGB", (56, 56), "WHITE"))


def test_images_take_their_places_and_sampled_placeholders_none() -> None:
    images = [made_image(0), made_image(0, rows=2, columns=1, data=b"b")]
    prompt, placed = place_images((5, PAD, 6, PAD), PAD, images)
    assert prompt == (5, PAD, PAD, 6, PAD, PAD)
    assert [one.start for one in placed] == [1, 4]
    longer, (more,) = place_images((*prompt, 7, PAD, 8, PAD), PAD, images[:1], first=8)
    assert longer == (*prompt, 7, PAD, 8, PAD, PAD)
    assert more.start == 9
    with pytest.raises(ValueError, match="places for 1 of 2"):
        place_images((5, PAD), PAD, images)
    with pytest.raises(ValueError, match="more places"):
        place_images((5, PAD, PAD), PAD, images[:1])


def test_positions_of_rows_and_columns() -> None:
    image = made_image(2, rows=2, columns=3)
    positions_L3 = rope_positions(10, [image])
    assert positions_L3.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        *([2, 2 + row, 2 + column] for row in range(2) for column in range(3)),
        [5, 5, 5],
        [6, 6, 6],
    ]
    assert rope_positions(3, ()).tolist() == [[n] * 3 for n in range(3)]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([made_image(6)], "outside"),
        ([made_image(1), made_image(2)], "overlap"),
        ([made_image(4)], "not all"),
        ([made_image(1, rows=0)], "outside"),
        ([made_image(-2)], "outside"),
    ],
)
def test_wrong_places_are_refused(images: list[PromptImage], said: str) -> None:
    prompt = (5, PAD, PAD, 6, 7, 8, PAD)
    limits = EngineLimits(max_model_len=100, vocab_size=100, image_token_id=PAD)
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=5),
        images=tuple(images),
    )
    with pytest.raises(InvalidRequestError, match=said):
        validate_request(request, limits, ())
    assert recorded_images_error(images, prompt)
    fine = replace(request, images=(made_image(1),))
    validate_request(fine, limits, ())
    with pytest.raises(InvalidRequestError, match="text only"):
        validate_request(fine, replace(limits, image_token_id=None), ())


def test_prefixes_with_other_pictures_are_not_shared() -> None:
    tokens = (5, PAD, PAD, 6, 7, 8)
    mask = (False, False, False, False, True, True)
    same, other = made_image(1), made_image(1, data=b"b")
    episodes = [
        replace(make_episode(tokens, mask, seed=seed), images=(image,))
        for seed, image in enumerate([same, other, same])
    ]
    batch = pack_episodes(episodes, row_len=10, temperature=1.0).batch
    assert batch is not None
    assert len(batch.images) == 2
    trees = sort_episodes(batch, batch.loss_mask, share_prefixes=True)
    assert sorted(trees.shared) == [0, 1, 5]


def conversation() -> tuple[Any, Any]:
    """Two turns; the second one brings another picture."""
    first = turn((5, PAD, PAD, 6), (7, PAD), images=(made_image(1),))
    prompt = (*first.token_ids, 8, PAD, PAD)
    return first, turn(
        prompt, (4,), images=(made_image(1), made_image(7, data=b"b")), request_id="g/r0/t1"
    )


def test_records_have_each_picture_once_and_give_all_back() -> None:
    first, second = conversation()
    data = turn_to_bytes(second, first, None)
    assert turn_from_bytes(data, first)[0] == second
    assert len(data) < len(turn_to_bytes(second, None, None))
    recorded = RecordedRollout(
        rollout_id="g/r0",
        turns=(first,),
        prompt_token_ids=second.prompt_token_ids,
        images=second.images,
    )
    saved = saved_rollout(recorded)
    assert [one.data for one in saved[0].images] == [b"b"]
    assert restored_rollout(saved) == recorded


def test_turns_with_another_picture_begin_another_episode() -> None:
    first, second = conversation()
    (whole,) = rollout_to_episodes(rollout(first, second), 1.0)
    assert whole.images == second.images
    changed = replace(second, images=(made_image(1, data=b"c"), second.images[1]))
    assert len(rollout_to_episodes(rollout(first, changed), 1.0)) == 2


def test_recorded_rollouts_have_their_pictures() -> None:
    whole = rollout(*conversation())
    row = rollout_to_json(
        RolloutGroup(group_id="g", problem=PROBLEM, rollouts=(whole,)), whole, is_whole=True
    )
    assert [["png" in one for one in of["images"]] for of in row["turns"]] == [
        [True],
        [False, True],
    ]
    assert [one.images for one in rollout_from_json(row).turns] == [
        one.images for one in whole.turns
    ]
    row["turns"][0]["images"][0]["png"] = base64.b64encode(b"x").decode()
    with pytest.raises(ValueError, match="SHA-256"):
        rollout_from_json(row)


class PictureEnv:
    """Shows a picture, then another one; then edits the conversation."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self) -> MessageObservation:
        return MessageObservation(messages=[self._message(0)])

    async def step(self, message: dict[str, Any]) -> MessageObservation:
        self.turns += 1
        if self.turns == 2:
            return MessageObservation(replace_messages=[self._message(2)])
        return MessageObservation(messages=[self._message(self.turns)])

    async def finish(self, status: Any) -> Any: ...

    async def close(self) -> None: ...

    async def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]

    @staticmethod
    def _message(seed: int) -> dict[str, Any]:
        shown = {"type": "image", "image": picture(60, 60 + 28 * seed, seed=seed)}
        text = {"type": "text", "text": "What is <|image_pad|>?"}
        return {"role": "user", "content": [text, shown]}


def said(tokenizer: Any, text: str) -> Completion:
    token_ids = tuple(tokenizer.encode(text))
    return Completion(
        request_id="",
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        version_runs=(),
        finish_reason=FinishReason.STOP,
    )


def test_pictures_in_messages_become_tokens_of_the_prompt(
    tokenizer: Any, reader: ImageReader
) -> None:
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    async def play() -> None:
        env = MessageTokenEnv(PictureEnv(), make_renderer(tokenizer, kind="chatml"))
        first = await env.reset()
        assert first.images == (replace(reader.read(picture(60, 60)), start=first.images[0].start),)
        assert first.prompt_token_ids.count(pad) == 4  # the text's is encoded as text
        said_pad = said(tokenizer, "<|image_pad|>, I say<|im_end|>")
        assert pad in said_pad.token_ids
        second = await env.step(said_pad)
        begin = first.prompt_token_ids + said_pad.token_ids
        assert second.prompt_token_ids[: len(begin)] == begin
        assert second.images[:1] == first.images
        assert second.images[1].start > len(begin)
        for one in second.images:
            assert set(second.prompt_token_ids[one.start : one.end]) == {pad}
        resumed = MessageTokenEnv(PictureEnv(), make_renderer(tokenizer, kind="chatml"))
        await resumed.load_state_dict(await env.state_dict())
        third = await env.step(said(tokenizer, "b<|im_end|>"))
        assert await resumed.step(said(tokenizer, "b<|im_end|>")) == third
        assert len(third.images) == 1
        assert env.messages[0]["content"][1] == {"type": "image", "sha256": third.images[0].digest}

    asyncio.run(play())


def test_a_renderer_without_images_says_so(tokenizer: Any) -> None:
    env = MessageTokenEnv(PictureEnv(), make_renderer(tokenizer, kind="qwen3"))
    with pytest.raises(ValueError, match="renderer chatml"):
        asyncio.run(env.reset())


@pytest.mark.parametrize("kind", ["image_url", "video"])
def test_other_media_in_messages_are_refused(tokenizer: Any, kind: str) -> None:
    """Templates write a place for them, at which the policy would see nothing."""

    class OtherEnv(PictureEnv):
        async def reset(self) -> MessageObservation:
            part = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
            return MessageObservation(messages=[{"role": "user", "content": [part]}])

    env = MessageTokenEnv(OtherEnv(), make_renderer(tokenizer, kind="chatml"))
    with pytest.raises(WrongAnswerError, match=rf'"image": PIL.Image.*content\[0\], got.*{kind}'):
        asyncio.run(env.reset())


def test_patches_are_those_of_the_processor_of_transformers_with_scaling(
    reader: ImageReader, tokenizer: Any
) -> None:
    """A stored picture is not scaled again, also not by vLLM's processor, which scales."""
    scaling = reader._processor
    image = reader.read(picture(200, 333))
    from PIL import Image

    scaled = scaling(images=[Image.open(io.BytesIO(image.data))], return_tensors="np")
    assert np.array_equal(scaled["pixel_values"], reader.patches(image.data))
    assert scaled["image_grid_thw"].tolist() == [[1, 2 * image.rows, 2 * image.columns]]
