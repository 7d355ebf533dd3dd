"""The search tool: BM25 (Robertson and Zaragoza 2009, by `bm25s`) over a world's documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torchtitan_rl.experiments.search.world import make_world

SEARCH: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "find documents",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}
NOTHING = "nothing found"


class SearchIndex:
    """Equal scores keep the order of the documents, so a query always finds the same ones."""

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s  # takes a moment to import

        self._documents = documents
        self._bm25 = bm25s.BM25()
        self._bm25.index(_words(documents), show_progress=False)

    def find(self, query: str, count: int) -> list[str]:
        """At most ``count`` documents that have a word of the query, the best first."""
        words = _words([query])[0]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[:count]
        return [self._documents[place] for place in best if scores[place] > 0]


@lru_cache(maxsize=1024)
def index_of(world: str) -> SearchIndex:
    return SearchIndex(tuple(make_world(world).documents))


def _words(texts: Sequence[str]) -> Any:
    import bm25s

    return bm25s.tokenize(list(texts), stopwords=[], return_ids=False, show_progress=False)
