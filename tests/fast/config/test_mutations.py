"""Each value of each field of each ready configuration can start, or is refused in one line."""

from __future__ import annotations

from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from tests.support.config_mutations import branches, leaves, values_for, with_value
from tests.support.golden import check_golden
from tests.support.ready_configs import READY, ready
from torchtitan_rl.commands.env import EnvCheckConfig
from torchtitan_rl.commands.generate import GenerateOptions
from torchtitan_rl.commands.serve import ServeConfig, prepare_serve
from torchtitan_rl.config.evaluate import EvalConfig
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as GOLDEN_CONFIG
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.rollout.config import OverlongConfig
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.training.config import LossConfig

GOLDEN = "alphabet_sort_tiny"
# Of the others but the first only what differs from it is tried, or all in the soak tests.
ALWAYS = {GOLDEN, "alphabet_sort_qwen3_0_6b", "agent_libraries_tiny", "mixture_smollm2"}
MUTATED = [
    one
    if one.values[0] in ALWAYS
    else pytest.param(*one.values, marks=[*one.marks, pytest.mark.soak])
    for one in READY
]
RELATED = {
    "task.num_validation_problems": "evaluation.num_problems",  # which says how many
    "task.messages": "task.prompt",  # which is used without messages
}
# A value that another configuration can have may need more than this one's machine has.
NO_ROOM = (" needs about ", "there is no room for ", " CUDA devices, and ")
# A process of its own looks at each value of these, which takes seconds.
SLOW = {"verifiers_tiny": ("task.env", "task.folders", "task.num_problems")}


def is_as_in(usual: RunConfig | None, config: RunConfig, field: str) -> bool:
    """Whether ``usual``, all of whose fields are tried, has the same value there."""
    value = attrgetter(field)
    return usual is not None and not field.startswith("task.") and value(usual) == value(config)


def complaints(config: Any, machine: HostFacts) -> list[str]:
    try:
        prepare_run(config, machine).describe()
    except ConfigError as error:
        return error.errors or ["nothing was said"]
    return []


@pytest.mark.parametrize("name", MUTATED)
def test_every_value_of_every_field_starts_or_is_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    config, machine = ready(name, tmp_path)
    assert complaints(config, machine) == []
    tried, refused = 0, []
    usual = GOLDEN_CONFIG if name in ALWAYS - {GOLDEN} else None
    for field, hint in leaves(config):
        is_left_out = field in SLOW.get(name, ()) or is_as_in(usual, config, field)
        for value in () if is_left_out else values_for(hint):
            found = complaints(with_value(config, field, value), machine)
            tried += 1
            refused += [f"{field} = {value!r:.60}: {one:.300}" for one in found]
            case = f"{field} = {value!r}: {found}"
            if found:
                names = (field, RELATED.get(field, field), *NO_ROOM)
                assert any(name in one for one in found for name in names), case
                # A number of tokens can be too small, and no multiple of the ranks besides.
                of_field = sum(one.startswith((f"{field} ", f"{field}=")) for one in found)
                assert of_field <= (2 if field.startswith("trainer.max_") else 1), case
            assert all("\n" not in one and len(one) < 6000 for one in found), case
    assert tried > (100 if usual else 900)
    if name == GOLDEN:
        check_golden("refusals.txt", "\n".join(refused), replaced={str(tmp_path): "TMP"})
    assert [one for one in tmp_path.iterdir() if one.name != "policy"] == []


@pytest.mark.parametrize("name", READY)
def test_a_value_in_place_of_a_whole_part_is_refused(name: str, tmp_path: Path) -> None:
    config, machine = ready(name, tmp_path)
    for field in branches(config):
        for value in (None, 3, "text", {}):
            (found, *_) = complaints(with_value(config, field, value), machine)
            assert found.startswith(f"{field} is ")


def test_every_value_of_every_option_of_serve_starts_or_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    config = ServeConfig(
        model=str(POLICY_DIR), log_dir=tmp_path / "logs", endpoint=EndpointConfig(port=0)
    )
    assert prepare_serve(config).describe()
    names = {"model": "MODEL"}
    for field, hint in leaves(config):
        for value in values_for(hint):
            found = []
            try:
                prepare_serve(with_value(config, field, value)).describe()
            except ConfigError as error:
                found = error.errors
            case = f"{field} = {value!r}: {found}"
            if found:
                assert any(names.get(field, field) in one or field in one for one in found), case
            assert all("\n" not in one for one in found), case
    assert list(tmp_path.iterdir()) == []


def test_every_value_of_every_option_of_generate_is_taken_or_refused_in_one_line(
    tmp_path: Path,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    options = GenerateOptions(model=str(POLICY_DIR), input=prompts, output=tmp_path / "out.jsonl")
    assert options.errors() == []
    for field, hint in leaves(options):
        for value in values_for(hint):
            found = with_value(options, field, value).errors()
            case = f"{field} = {value!r}: {found}"
            assert not found or any(field.replace("_", "-") in one for one in found), case
            assert all("\n" not in one for one in found), case
    assert list(tmp_path.iterdir()) == [prompts]


def test_every_number_of_every_configuration_has_bounds() -> None:
    kinds: list[Any] = [RunConfig, ServeConfig, GenerateOptions, EvalConfig, EnvCheckConfig]
    for kind in kinds:  # which grows by their sections
        kinds += [hint for hint in get_type_hints(kind).values() if is_dataclass(hint)]
        for field, hint in get_type_hints(kind, include_extras=True).items():
            inner = () if get_origin(hint) is Annotated else get_args(hint)
            assert not {int, float} & {hint, *inner}, (kind, field)
    assert {LossConfig, OverlongConfig} <= {*kinds}
