"""What a run needs of its devices, and options with which it fits."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ready_configs import NUM_GPUS, TOYS, ready
from torchtitan_rl.commands.cli import main
from torchtitan_rl.config.fit import device_memory_errors, fitting_options
from torchtitan_rl.config.loader import load_config, parse_options
from torchtitan_rl.config.machine import HostFacts, made_up_hosts
from torchtitan_rl.config.memory import PINNED, MemoryPlan, memory_plan
from torchtitan_rl.config.plan import plan_on_hosts
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.config.published import published_facts
from torchtitan_rl.config.room import machine_errors, too_little_memory
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.configs.alphabet_sort_qwen3_0_6b import config as QWEN3
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.errors import ConfigError

GPUS = ["1x24GB", "1x80GB", "8x80GB", "2x8x80GB"]
GIB = 2**30


def planned(tmp_path: Path, hosts: str, model: str = "Qwen/Qwen3-0.6B", *words: str) -> PreparedRun:
    config = load_config(
        Path("alphabet_sort_qwen3_0_6b"),
        [
            *("--policy.checkpoint", model, "--launch.hosts", hosts, "--output-dir", str(tmp_path)),
            *("--launch.allow-plain-tcp", *words),
        ],
    )
    return prepare_run(config)


@pytest.mark.parametrize("hosts", GPUS)
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-72B-Instruct"])
def test_a_plan_on_made_up_devices_fits_or_is_refused_with_options_that_fit(
    model: str, hosts: str, tmp_path: Path
) -> None:
    """The model is not on this machine, and is not downloaded."""
    words: list[str] = []
    try:
        planned(tmp_path, hosts, model)
        refusal = ""
    except ConfigError as error:
        refusal = error.errors[0]
        words = shlex.split(refusal.rpartition("; give ")[2])
    if "72B" in model or (model, hosts) == ("Qwen/Qwen3-4B", "1x24GB"):
        assert "no options fit; give more or larger devices" in refusal
        return
    printed = planned(tmp_path, hosts, model, *words).describe()
    for part in ("memory of each trainer rank: about", "KV cache holds", "versions published"):
        assert part in printed


@pytest.mark.parametrize("devices", GPUS)
def test_fit_prints_a_command_whose_dry_run_passes_or_says_that_nothing_fits(
    devices: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--policy.checkpoint", "Qwen/Qwen2.5-32B-Instruct"]
    words = ["alphabet_sort_qwen3_0_6b", *model, "--output-dir", str(tmp_path)]
    code = main(["fit", *words, "--devices", devices])
    *_, last = capsys.readouterr().out.splitlines()
    if devices.startswith("1x"):
        assert code == 1
        assert last.startswith("nothing fits: Qwen/Qwen2.5-32B-Instruct (32.8 B parameters)")
        assert ": a trainer rank needs at least about " in last
        return
    assert code == 0
    _, *command = shlex.split(last)
    assert main([*command, "--dry-run", "--launch.hosts", devices]) == 0
    assert "memory of each trainer rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--mode", "generate", "--policy.checkpoint", "Qwen/Qwen3-14B"],
            r"a replica's rank has at most .*, which holds no request of generator.max_model_len",
        ),
        (["--teacher.checkpoint", "Qwen/Qwen3-8B"], "there are too few devices for .* teachers"),
    ],
    ids=["KV cache", "teacher"],
)
def test_fit_says_why_nothing_fits(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "alphabet_sort_qwen3_0_6b", *words, "--devices", "1x24GB"]) == 1
    assert re.search(f"^nothing fits: .*: {reason}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["--mode", "generate"], "2x8x80GB"),
        (["--mode", "generate", "--generator.replicas", "1"], "1x80GB"),
        (["--mode", "train", "--rollouts", "recorded"], "8x80GB"),
    ],
)
def test_a_run_without_trainer_or_replicas_may_take_every_device(
    words: list[str], devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["alphabet_sort_qwen3_0_6b", "--policy.checkpoint", "Qwen/Qwen3-4B"]
    assert main(["fit", *model, *words, "--devices", devices]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    _, _, config_name, *options = shlex.split(last)
    hosts = made_up_hosts(devices)
    plan = plan_on_hosts(load_config(Path(config_name), options), hosts)
    assert plan.num_devices == sum(len(host.cuda_devices) for host in hosts)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--devices", "9999x999x80GB"], "--devices is '9999x999x80GB'"),
        (["--devices", "2x8x80GB", "--launch.trainer-hosts", "5"], "launch.trainer_hosts is (5,)"),
        (["--devices", "8x80GB", "--policy.checkpoint", "Qwen/Qwen3-4B-FP8"], "Qwen3-4B-FP8"),
        (["--devices", "8x80GB", "--generator.endpoint", "http://h/v1"], "fit places replicas"),
    ],
)
def test_what_fit_cannot_take_is_one_error(
    words: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = ["alphabet_sort_qwen3_0_6b", "--policy.checkpoint", "Qwen/Qwen3-0.6B"]
    assert main(["fit", *model, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line


def test_a_host_without_memory_for_a_run_on_cuda_gets_no_advice_for_a_cpu() -> None:
    policy = published_facts("Qwen/Qwen3-8B")
    assert policy is not None
    colocated = replace(QWEN3, placement="colocated")
    (error,) = too_little_memory(
        colocated, policy, 64 * GIB, device="cuda", replicas=4, trainer_ranks=2
    )
    assert error.startswith("placement is colocated: processes, the trainer's pinned state and ")
    assert error.endswith("the machine has 64 GiB; give separate, or more memory")


def test_a_refusal_proposes_one_set_of_options(tmp_path: Path) -> None:
    for hosts, model in (("1x24GB", "Qwen/Qwen3-0.6B"), ("1x80GB", "Qwen/Qwen2.5-72B-Instruct")):
        with pytest.raises(ConfigError) as refused:
            planned(tmp_path, hosts, model)
        assert "or let trainer and replicas share" not in refused.value.errors[0]
    machine = HostFacts(
        cuda_devices=("0",), device_bytes=24 * 10**9, num_cores=16, memory_bytes=64 * GIB
    )
    (error,) = machine_errors(QWEN3, published_facts("Qwen/Qwen3-0.6B"), machine)
    assert error.endswith(
        "1 is visible; give --placement colocated --generator.replicas 1 "
        "--trainer.data-parallel-shard 1 --trainer.max-tokens-per-microbatch 4096"
    )


@pytest.mark.parametrize("hosts", GPUS)
@pytest.mark.parametrize("name", TOYS)
def test_a_real_task_fits_its_cards_and_others_are_refused_with_options_that_fit(
    name: str, hosts: str, tmp_path: Path
) -> None:
    pytest.importorskip("bm25s")
    config, _ = ready(name, tmp_path)
    launch = replace(config.launch, hosts=hosts, allow_plain_tcp=True)
    config = replace(config, launch=launch)
    try:
        prepared = prepare_run(config)
    except ConfigError as error:
        assert hosts != ("1x24GB" if name in NUM_GPUS else "8x80GB")
        if "no options fit; give more or larger devices" in error.errors[0]:
            assert hosts == "1x24GB" or (hosts == "1x80GB" and name != "gsm8k_qwen3_4b")
            return
        words = shlex.split(error.errors[0].rpartition("; give ")[2])
        prepared = prepare_run(parse_options(RunConfig, words, prog=name, default=config))
    assert "memory of each trainer rank: about" in prepared.describe()


def test_a_policy_of_72b_does_not_fit_on_one_card(tmp_path: Path) -> None:
    one = ("--placement", "colocated", "--generator.replicas", "1")
    one += ("--trainer.data-parallel-shard", "1")
    with pytest.raises(ConfigError, match=r"a trainer rank needs about .* a device has 74\.5 GiB"):
        planned(tmp_path, "1x80GB", "Qwen/Qwen2.5-72B-Instruct", *one)


def test_a_run_that_fits_keeps_its_options_and_another_gets_what_it_lacks() -> None:
    policy = published_facts("Qwen/Qwen3-8B")
    assert policy is not None
    hosts = made_up_hosts("8x80GB")
    options = fitting_options(QWEN3, policy, hosts)
    assert options == {
        "trainer.max_tokens_per_microbatch": 4096,
        "trainer.activation_checkpointing": "full",
    }
    long = {"max_episode_tokens": 131_072, "max_tokens_per_microbatch": 131_072}
    large = published_facts("Qwen3-4B")
    assert large is not None
    options = fitting_options(replace(QWEN3, trainer=replace(QWEN3.trainer, **long)), large, hosts)
    assert options == {
        "trainer.context_parallel": 2,
        "trainer.activation_checkpointing": "full",
    }
    small = published_facts("Qwen3-0.6B")
    assert small is not None
    assert fitting_options(QWEN3, small, hosts) == {}
    assert device_memory_errors(QWEN3, small, hosts) == []
    assert device_memory_errors(QWEN3, policy, made_up_hosts("8x8")) == []  # of unknown size
    taught = replace(QWEN3, teacher=TeacherConfig(checkpoint="Qwen/Qwen3-0.6B"))
    assert fitting_options(taught, small, made_up_hosts("1x80GB")) is None


def test_a_teacher_that_no_device_holds_is_refused() -> None:
    small, large = published_facts("Qwen3-0.6B"), published_facts("Qwen/Qwen2.5-72B-Instruct")
    assert small is not None
    assert large is not None
    taught, hosts = replace(QWEN3, teacher=TeacherConfig(checkpoint="a")), made_up_hosts("8x80GB")
    assert device_memory_errors(taught, small, hosts, [small]) == []
    (error,) = device_memory_errors(taught, small, hosts, [small, large])
    assert error.startswith("teacher.tensor_parallel is 1: a teacher's rank has 142.3 GiB")
    split = replace(taught, teacher=TeacherConfig(checkpoint="a", tensor_parallel=4))
    assert device_memory_errors(split, small, hosts, [large]) == []


def test_what_each_choice_adds_to_the_memory_of_a_rank(tmp_path: Path) -> None:
    policy = published_facts("Qwen3-4B")
    assert policy is not None

    def trainer(config: RunConfig = QWEN3, **changes: object) -> dict[str, int]:
        config = replace(config, trainer=replace(config.trainer, **changes))
        return memory_plan(config, policy, device="cuda", device_bytes=80 * GIB).trainer

    usual, alone = trainer(), trainer(data_parallel_shard=1)
    assert alone["optimizer"] == 2 * usual["optimizer"] == 8 * 4_022_272_000
    split = trainer(context_parallel=2)  # which also shards the weights
    assert 2 * split["optimizer"] == usual["optimizer"]
    assert split["logits"] < usual["logits"]
    one, two = (trainer(context_parallel=n, activation_checkpointing="full") for n in (1, 2))
    assert 2 * two["activations"] == one["activations"]
    penalty = replace(QWEN3.trainer.loss, kl_coefficient=0.1)
    assert trainer(loss=penalty)["reference policy"] == usual["weights"]
    kinds = ["full", "selective", "none"]
    sizes = [trainer(activation_checkpointing=kind)["activations"] for kind in kinds]
    assert sizes == sorted(sizes)
    assert trainer(replace(QWEN3, placement="colocated"))["sleeping engine"] > 2 * GIB


def test_the_24_gb_configuration_fits_on_its_card(tmp_path: Path) -> None:
    config, machine = ready("gsm8k_qwen3_0_6b", tmp_path)
    memory = prepare_run(config, machine).memory
    assert memory is not None
    assert 12 * GIB < sum(memory.trainer.values()) < 22 * GIB
    assert memory.kv_tokens > 100_000
    assert "pinned copies of the trainer's state" in memory.host


def test_an_engine_on_cuda_keeps_latent_vectors_which_each_rank_has_whole() -> None:
    policy = published_facts("moonshotai/Moonlight-16B-A3B")
    assert policy is not None
    assert policy.num_weights == pytest.approx(15.96e9, rel=1e-3)
    for ranks in (1, 4):
        assert policy.kv_values("cuda", ranks) == 27 * (512 + 64)
        assert policy.kv_values("cpu", ranks) == 27 * 2 * 16 * 192 // ranks
    config = replace(QWEN3, generator=replace(QWEN3.generator, tensor_parallel=4))
    plan = memory_plan(config, policy, device="cuda", device_bytes=80 * 10**9)
    assert plan.kv_tokens == plan.replica["KV cache"] // (2 * 27 * (512 + 64))


@pytest.mark.parametrize(
    ("name", "size", "tower"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976, 668_170_240),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, 676_034_560),
    ],
)
def test_a_policys_vision_tower_is_a_part_of_its_memory(name: str, size: int, tower: int) -> None:
    """The sizes are those of the published weight files."""
    policy = published_facts(name)
    assert policy is not None
    assert policy.num_weights == pytest.approx(size, rel=3e-4)  # norms and biases

    def plan(**changes: bool) -> MemoryPlan:
        trainer = replace(QWEN3.trainer, data_parallel_shard=1, **changes)
        config = replace(QWEN3, trainer=trainer, placement="colocated")
        return memory_plan(config, policy, device="cuda", device_bytes=80 * GIB)

    frozen, trained = plan(), plan(train_vision_tower=True)
    assert frozen.replica["weights"] == 2 * policy.num_weights
    assert frozen.trainer["weights"] == trained.trainer["weights"] == 4 * policy.num_weights
    assert trained.trainer["gradients"] - frozen.trainer["gradients"] == 4 * tower
    assert trained.trainer["optimizer"] - frozen.trainer["optimizer"] == 8 * tower
    assert frozen.trainer["gathered weights"] > 2 * tower
    for part, least in (("published weights", 2 * tower), (PINNED, 8 * tower)):
        assert trained.host[part] - frozen.host[part] >= least


def test_fit_splits_no_policy_that_takes_images_over_its_tokens_or_heads() -> None:
    policy = published_facts("Qwen/Qwen2.5-VL-7B-Instruct")
    assert policy is not None
    options = fitting_options(QWEN3, policy, made_up_hosts("8x80GB"), uses_all=True)
    assert options is not None
    assert {"trainer.tensor_parallel", "trainer.context_parallel"}.isdisjoint(options)
