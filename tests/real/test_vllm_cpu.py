"""How engines on a CPU are built."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl.backends.vllm.engine import VllmEngine, VllmEngineOptions


def test_the_thread_that_built_an_engine_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its OpenMP threads would make all others sleep (see `in_temporary_thread`)."""
    from vllm.v1.engine.llm_engine import LLMEngine

    builders: list[threading.Thread] = []

    def refuse(arguments: Any) -> None:
        builders.append(threading.current_thread())
        raise RuntimeError("no engine")

    monkeypatch.setattr(LLMEngine, "from_engine_args", refuse)
    with pytest.raises(RuntimeError, match="no engine"):
        VllmEngine(VllmEngineOptions(model=str(tmp_path)))
    assert builders[0] is not threading.main_thread()
    assert not builders[0].is_alive()
