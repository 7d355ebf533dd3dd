"""Models of the Hugging Face hub, in a cache that was made here; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from torchtitan_rl.config.evaluate import find_models
from torchtitan_rl.config.model import find_policy, resolve_checkpoint
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has org/policy, and the configuration alone of org/part."""
    for name, files in {"policy": [*POLICY_DIR.iterdir()], "part": ["config.json"]}.items():
        folder = tmp_path / f"models--org--{name}"
        snapshot = folder / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        for file in files:
            (snapshot / Path(file).name).symlink_to(POLICY_DIR / file)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_offline_a_model_of_the_hub_is_the_one_in_the_cache(cache: Path) -> None:
    directory, facts = find_policy("org/policy", is_trained=True)
    assert directory == cache / "models--org--policy" / "snapshots" / "0123abcd"
    assert facts == find_policy(str(POLICY_DIR))[1]
    (model,) = find_models(["org/policy"], POLICY_DIR)
    assert (model.name, model.path) == ("org/policy", directory)


def test_offline_a_model_that_is_not_in_the_cache_is_one_line_with_the_folder(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_checkpoint("org/other", field="MODEL")
    (line,) = caught.value.errors
    assert line.startswith("MODEL is 'org/other': there is no such directory, no such model in ")
    assert str(cache) in line
    assert "offline mode is enabled" in line
    assert "\n" not in line


@pytest.mark.parametrize("text", ["/a/b", "./a", "a", "a/b/c", "../b", "~/b", "a/", ".a/b", ""])
def test_a_path_is_never_looked_up_on_the_hub(text: str) -> None:
    with pytest.raises(ConfigError, match=r"in that directory|no such directory"):
        resolve_checkpoint(text)
