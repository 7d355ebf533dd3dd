"""Whether a chat template can be rendered at all; what it does with messages is not asked."""

from __future__ import annotations

import os
from pathlib import Path


def template_error(path: str) -> str:
    """What is wrong with the template in a file, in one line; empty where nothing is."""
    # With the tags that transformers adds to Jinja's own.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if not os.path.isfile(path):  # which is False for names that no file can have
        return (
            "there is no such file; give a Jinja template, or leave it out for the tokenizer's own"
        )
    try:
        _compile_jinja_template(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        return f"it is no chat template in Jinja: {error}"
    return ""
