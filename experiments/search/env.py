"""The environment of search: made-up worlds, questions about them, and the tool ``search``.

A world is a set of documents about people and towns. Each world has its own facts, so a policy
cannot memorize them, but must search. Invariants: a world depends only on its name. Worlds of the
two splits have different names, so no document is in both splits.

``search`` ranks a world's documents by BM25 (Robertson and Zaragoza 2009, from `bm25s`). The score
of an answer is 1 if its last word is right.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torchtitan_rl import Problem, Split, ToolAnswer


class SearchTools:
    """Implements the `Tools` of a rollout; ``search`` finds the documents of a query."""

    def __init__(self, search: Callable[[str], Awaitable[list[str]]]) -> None:
        self._search = search

    async def open(self) -> Sequence[Mapping[str, Any]]:
        return [SEARCH]

    async def call(self, name: str, arguments: Mapping[str, Any], /) -> ToolAnswer:
        query = arguments.get("query")
        if name != SEARCH["function"]["name"]:
            return ToolAnswer(text=f"error: there is no tool {name}", failed=True)
        if not isinstance(query, str):
            return ToolAnswer(text="error: the arguments must be one query", failed=True)
        return ToolAnswer(text="\n".join(await self._search(query)) or NOTHING)

    async def close(self) -> None:
        """There is nothing to release."""


async def score(text: str, *, answer: str) -> float:
    return float(is_right(text, answer))


def is_right(text: str, answer: str) -> bool:
    """Whether ``text`` ends with the answer.

    >>> is_right("It is known for its cheese.", "cheese")
    True
    """
    words = text.strip().rstrip(".").split()
    return bool(words) and words[-1] == answer


FIRST_NAMES = (
    "Adam", "Alice", "Boris", "Carla", "David", "Emma", "Felix", "Greta",
    "Hugo", "Irene", "Jonas", "Laura", "Milan", "Nina", "Oscar", "Vera",
)  # fmt: skip
LAST_NAMES = (
    "Barlow", "Brook", "Carter", "Dale", "Field", "Fisher", "Hill", "Marsh",
    "Miller", "Moor", "Potter", "Reed", "Shore", "Stone", "Weaver", "Wood",
)  # fmt: skip
TOWNS = (
    "Aldby", "Belfort", "Corwen", "Darrow", "Elmira", "Fenwick", "Galston", "Harlow",
    "Inver", "Jarrow", "Kelso", "Lorton", "Marlow", "Norby", "Orford", "Penrith",
)  # fmt: skip
RIVERS = (
    "Arn", "Bure", "Clyst", "Dove", "Esk", "Frome", "Glen", "Hull",
    "Ive", "Kent", "Lune", "Mole", "Nene", "Otter", "Severn", "Rye",
)  # fmt: skip
PRODUCTS = (
    "baskets", "bells", "bread", "candles", "carpets", "cheese", "clocks", "glass",
    "honey", "lace", "paper", "salt", "ships", "soap", "violins", "wine",
)  # fmt: skip
JOBS = (
    "baker", "carpenter", "doctor", "driver", "gardener", "judge", "nurse", "painter",
    "pilot", "plumber", "printer", "singer", "tailor", "teacher", "waiter", "writer",
)  # fmt: skip

PERSON = "{person} lives in {town} and works as a {job}."
TOWN = "{town} is a town on the river {river}. {town} is known for its {product}."
QUESTIONS: Mapping[str, str] = {  # questions, by the name of the requested fact
    "town": "In which town does {person} live?",
    "job": "As what does {person} work?",
    "river": "On which river is the town where {person} lives?",
    "product": "For what is the town known where {person} lives?",
}
_NUM_PEOPLE = 32
_NUM_TOWNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """``documents``: the documents of people, then of towns, each with the facts in it. ``facts``:
    the facts of each person, by name."""

    documents: Mapping[str, Mapping[str, str]]
    facts: Mapping[str, Mapping[str, str]]


@lru_cache(maxsize=1024)
def make_world(name: str) -> World:
    rng = random.Random(f"search/{name}")
    everyone = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    people = rng.sample(everyone, _NUM_PEOPLE)
    rivers, products = rng.sample(RIVERS, _NUM_TOWNS), rng.sample(PRODUCTS, _NUM_TOWNS)
    towns = [
        {"town": town, "river": river, "product": product}
        for town, river, product in zip(
            rng.sample(TOWNS, _NUM_TOWNS), rivers, products, strict=True
        )
    ]
    facts = {person: {**rng.choice(towns), "job": rng.choice(JOBS)} for person in people}
    documents = {
        PERSON.format(person=person, **known): {"town": known["town"], "job": known["job"]}
        for person, known in facts.items()
    }
    return World(documents=documents | {TOWN.format(**town): town for town in towns}, facts=facts)


def make_problem(split: Split, index: int, *, num_worlds: int, two_searches: float) -> Problem:
    """Make problem ``index`` of ``split``, about one of the split's worlds. ``two_searches``: share
    of questions about the town where somebody lives."""
    rng = random.Random(f"search/{split}/{index}")
    world = f"{split}/{index % num_worlds}"
    person = rng.choice(list(make_world(world).facts))
    asked = rng.choice(("river", "product") if rng.random() < two_searches else ("town", "job"))
    return Problem(
        problem_id=f"search/{split}/{index}",
        data={
            "world": world,
            "person": person,
            "asked": asked,
            "question": QUESTIONS[asked].format(person=person),
            "answer": make_world(world).facts[person][asked],
        },
    )


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
    """Ranks documents. Documents with equal scores keep their order, so a query always has the same
    result."""

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s  # takes a moment to import

        self._documents = documents
        self._bm25 = bm25s.BM25()
        self._bm25.index(_words(documents), show_progress=False)

    def find(self, query: str, count: int) -> list[str]:
        """Return at most ``count`` documents that contain a word of the query, the best first."""
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
