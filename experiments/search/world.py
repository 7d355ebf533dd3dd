"""Made-up worlds: documents about people and towns, and questions that they answer.

Each world has facts of its own, so nothing can be learned by heart: what a policy learns is to
search. Invariants: a world depends on its name alone; worlds of the two splits have other names, so
no document of one is in the other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torchtitan_rl import Problem, Split

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
QUESTIONS: Mapping[str, str] = {  # what is asked for -> the question
    "town": "In which town does {person} live?",
    "job": "As what does {person} work?",
    "river": "On which river is the town where {person} lives?",
    "product": "For what is the town known where {person} lives?",
}
_NUM_PEOPLE = 32
_NUM_TOWNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """``documents`` of people, then of towns, each with what it says; ``facts`` of each person, by
    what is asked for."""

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
    """Problem ``index`` of ``split``, about one of its worlds; ``two_searches`` is the share of
    questions about the town where somebody lives."""
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
