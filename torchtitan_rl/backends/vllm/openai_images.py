"""Images in requests to the endpoint: data URLs alone, read and scaled before vLLM sees them.

vLLM asks its media connector for each image of a request. Ours fetches nothing: it decodes data
URLs within the limits of `images.py`, one at a time, in turns between the HTTP requests, and
remembers the images of each. `taken_images` gives them their places among the tokens. All other
media, and options on how images are read, are refused before (`serving/app.py`).
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from torchtitan_rl.aio import uninterrupted
from torchtitan_rl.images import ImageReader, PromptImage, data_of_url

CONNECTOR = "torchtitan_rl"
_images: ContextVar[list[PromptImage | None]] = ContextVar("torchtitan_rl_images")
_next: ContextVar[asyncio.Lock] = ContextVar("torchtitan_rl_next_image")


class ImageScope:
    """ASGI middleware that gives each HTTP request a list of its images."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _images.set([])
        _next.set(asyncio.Lock())
        await self._app(scope, receive, send)


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class DataUrls(MediaConnector):
    """The media connector of the endpoint. ``reader`` is set before the first request."""

    reader: ImageReader
    _turn = asyncio.Lock()  # so that decoded images of many requests do not fill the memory

    async def fetch_image_async(self, image_url: str, **_: Any) -> Any:
        from PIL import Image

        images = _images.get()
        number = len(images)
        images.append(None)
        try:
            # One image of each request waits for its turn, so that 16 large ones, which take 14 s,
            # do not keep others waiting. The turn lasts until the thread has ended.
            async with _next.get(), self._turn:
                image = await uninterrupted(asyncio.to_thread(self._read, image_url))
        except ValueError as error:
            raise _invalid(str(error)) from error
        images[number] = image
        return Image.open(io.BytesIO(image.data), formats=("PNG",))

    def _read(self, url: str) -> PromptImage:
        return self.reader.read(data_of_url(url))

    def load_from_url(self, *_: Any, **__: Any) -> Any:
        raise _invalid("only images are served here, as data URLs")

    async def load_from_url_async(self, *_: Any, **__: Any) -> Any:
        raise _invalid("only images are served here, as data URLs")


def _invalid(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="image_url")


def taken_images(features: Sequence[Any] | None) -> tuple[PromptImage, ...]:
    """Return the images of the current HTTP request, at the places of vLLM's ``features``. Raises
    VLLMValidationError: there are other inputs than these images."""
    if not features:
        return ()
    places = [(one.mm_position.offset, one.mm_position.length) for one in features]
    read = [one for one in _images.get() if one is not None]
    if [one.num_tokens for one in read] != [length for _, length in places]:
        raise _invalid("the images of the prompt are not those that were given as data URLs")
    return tuple(replace(one, start=start) for one, (start, _) in zip(read, places, strict=True))
