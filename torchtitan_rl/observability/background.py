"""Work in the background of a block of code, and work that races with other work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], *, name: str) -> AsyncIterator[None]:
    """Run ``work`` as a task while the block is open, then cancel it and wait for its end.

    Raises:
        Exception: whatever ended the work before the block's end, unless the block raised itself.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def first_of(*works: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work that ends first; of several at once, that of the first one given.

    The others are cancelled, and have ended.

    Raises:
        Exception: what that work raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
