"""Two policies are told apart wherever their weights differ."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from torchtitan_rl.backends.monarch.host_agent import describe_host
from torchtitan_rl.config.evaluate import EvalModel
from torchtitan_rl.config.resume import digest_limit_s, policy_digest, policy_fingerprint
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same policy, but for one byte in the middle of its weights."""
    shutil.copytree(POLICY_DIR, tmp_path / "policy")
    weights = tmp_path / "policy" / "model.safetensors"
    change_byte(weights, weights.stat().st_size // 2)
    return tmp_path / "policy"


def change_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (before,) = file.read(1)
        file.seek(position)
        file.write(bytes([before ^ 1]))


def test_one_byte_in_the_middle_is_another_policy(other: Path) -> None:
    assert policy_fingerprint(other) == policy_fingerprint(POLICY_DIR)  # by which it is not found
    assert policy_digest(other) != policy_digest(POLICY_DIR)
    found = {describe_host("local", str(path)).policy for path in (other, POLICY_DIR)}
    assert len(found) == 2
    models = [EvalModel(name="one", path=path) for path in (other, POLICY_DIR)]
    assert models[0].fingerprint != models[1].fingerprint


def test_a_file_that_changes_is_read_again(other: Path) -> None:
    weights = other / "model.safetensors"
    before, found = policy_digest(other), weights.stat()
    change_byte(weights, found.st_size // 2)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert policy_digest(other) == policy_digest(POLICY_DIR) != before


def test_a_large_policy_is_waited_for(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(20 << 30)
    assert digest_limit_s(tmp_path) > 60.0
    assert digest_limit_s(POLICY_DIR) < 1.0
