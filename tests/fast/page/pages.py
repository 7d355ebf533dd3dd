"""A page in the test's process, asked over HTTP without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from torchtitan_rl.page.app import Page, page_app

BASE = "http://127.0.0.1:8000"


class Asked:
    """Asks a page for JSON. ``get`` is relative to the first run."""

    def __init__(self, page: Page, app: Any) -> None:
        self.page = page
        self._app = app

    def send(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str | bytes] = {},
        **options: Any,
    ) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(ask())

    def get(self, path: str, **parameters: Any) -> Any:
        """The answer, after all that the runs have written was read."""
        self.page.read(seconds=60.0)
        self.page.read(seconds=60.0)  # that files were replaced is believed at the second look
        where = path if path.startswith("/") else f"/api/runs/0/{path}"
        answer = self.send(where, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def asked(*folders: Path, key: str = "", host: str = "127.0.0.1") -> Iterator[Asked]:
    page = Page(folders)
    try:
        app = page_app(page, host=host, port=8000, key=key)
        yield Asked(page, app)
    finally:
        page.close()
