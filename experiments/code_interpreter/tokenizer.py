"""The tokenizer of the embedded policy: words are tokens, and each digit and sign of arithmetic.

There is no chat template: the ``qwen3`` renderer writes the conversation.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.experiments.code_interpreter.conversations import answer_text, call_text
from torchtitan_rl.experiments.code_interpreter.dataset import KINDS
from torchtitan_rl.experiments.word_tokenizer import build_word_backend, with_chat_template

# Line breaks; a word, or a run of other signs, each with the space before it; a digit or a sign of
# arithmetic, each alone; other white space.
_PIECE = r"\n+| ?[A-Za-z]+|[0-9()+*/-]| ?[^\sA-Za-z0-9()+*/-]+|\s"

_ERRORS = (
    "NameError: name 'total' 'largest' 'text' 'numbers' is not defined\n"
    "ZeroDivisionError: integer modulo by zero\n"
    "total(largest(text(numbers("
)


def build_tokenizer() -> Any:
    """The `transformers` tokenizer that ships with the policy; the same one each time."""
    return with_chat_template(build_backend(), "")


def build_backend() -> Tokenizer:
    numbers = {"a": 0, "b": 0, "c": 0}
    texts = [kind.question.format(**numbers) for kind in KINDS]
    texts += [call_text(kind.expression.format(**numbers)) for kind in KINDS]
    covered = "\n".join(["user\nassistant\n", *texts, answer_text("0123456789"), _ERRORS])
    return build_word_backend(covered, piece=_PIECE)
