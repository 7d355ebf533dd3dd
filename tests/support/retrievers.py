"""Retrievers in a thread of this process: `start_retriever`."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torchtitan_rl.commands.retriever import Corpus, retriever_app, serve_retriever
from torchtitan_rl.serving.config import Keys, listen


def start_retriever(folder: Path, texts: Sequence[str], keys: Keys | None = None) -> str:
    """Serve these documents until this process ends. Returns the address for searches."""
    rows = [{"id": str(number), "contents": text} for number, text in enumerate(texts)]
    file = folder / "corpus.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = keys or Keys()
    app = retriever_app(Corpus([str(file)]), topk=3, keys=keys)
    listening = listen("127.0.0.1", 0, backlog=100)
    serve = partial(serve_retriever, app, listening, keys=keys)
    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/retrieve"
