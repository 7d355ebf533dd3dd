"""In which order the endpoint decodes the images of several requests."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.support.async_tests import on_event_loop
from tests.support.images import file_of, picture
from torchtitan_rl.backends.vllm.openai_images import DataUrls, ImageScope
from torchtitan_rl.images import PromptImage


class Reader:
    """Notes what it decodes, and that it decodes one at a time. The first image takes until
    ``others_wait`` is set."""

    def __init__(self) -> None:
        self.read_names: list[str] = []
        self.others_wait = threading.Event()
        self._one = threading.Lock()

    def read(self, data: bytes) -> PromptImage:
        assert self._one.acquire(blocking=False)
        self.read_names.append(data.decode())
        self.others_wait.wait()
        self._one.release()
        return PromptImage(start=0, rows=1, columns=1, data=file_of(picture(28, 28)))


def request(*names: str) -> Any:
    """An HTTP request whose images vLLM asks for, all at the same time."""

    async def application(*_: Any) -> None:
        urls = [f"data:image/png;base64,{base64.b64encode(n.encode()).decode()}" for n in names]
        await asyncio.gather(*map(DataUrls().fetch_image_async, urls))

    return ImageScope(application)({}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves", [False, True])
@on_event_loop
async def test_requests_take_turns(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    reader = Reader()
    monkeypatch.setattr(DataUrls, "reader", reader, raising=False)
    monkeypatch.setattr(DataUrls, "_turn", asyncio.Lock())
    first = asyncio.create_task(request("a0", "a1", "a2"))
    await until(lambda: bool(reader.read_names))
    second = asyncio.create_task(request("b0", "b1"))
    await asyncio.sleep(0.05)
    if leaves:
        first.cancel()
        await asyncio.sleep(0.05)
    reader.others_wait.set()
    with suppress(asyncio.CancelledError):
        await first
    await second
    assert reader.read_names == (["a0", "b0", "b1"] if leaves else ["a0", "b0", "a1", "b1", "a2"])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
