"""What `torchtitan-rl launch-script` prints is what the schedulers take: checked by their schemas,
by shells, and by running the scripts with small stand-ins for srun, ssh and torchrun."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from torchtitan_rl.commands.cli import main
from torchtitan_rl.launch.scripts.compose import ComposeOptions, compose_file
from torchtitan_rl.launch.scripts.job import Job
from torchtitan_rl.launch.scripts.kubernetes import KubernetesOptions, kubernetes_manifest
from torchtitan_rl.launch.scripts.slurm import SlurmOptions, slurm_script
from torchtitan_rl.launch.scripts.ssh import SshOptions, ssh_script

ROOT = Path(__file__).parents[3]
GPUS = "alphabet_sort_qwen3_0_6b"
TINY = "alphabet_sort_tiny"
PLAIN = "--allow-plain-tcp"
HOSTS = ("--hosts", "2x0", PLAIN)
KUBERNETES = "1.37"

# What sbatch takes, of what the scripts may use: name -> form of the value.
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "partition": r"[\w,-]+",
    "account": r"\w+",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "output": r"\S+",
    "open-mode": r"append|truncate",
    "signal": r"([RB]{1,2}:)?(TERM|INT|USR1|\d+)(@\d{1,5})?",
    "requeue": r"",
}


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]):
    def of(*words: str) -> str:
        assert main(["launch-script", *words]) == 0
        return capsys.readouterr().out

    return of


def directives(text: str) -> dict[str, str]:
    """The options of sbatch; it reads none after the first command."""
    head = re.split(r"^[^#\n]", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert head.count("#SBATCH") == text.count("#SBATCH")
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.MULTILINE))


def check_shell(text: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "--severity=warning", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def run_script(text: str, folder: Path, programs: dict[str, str]) -> list[list[str]]:
    """Run it with these programs, scripts of bash; returns what torchrun was called with."""
    programs["torchrun"] = f'printf "%s\\0" "$@" > {folder}/calls.$$'
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash"], input=text, env=environment, text=True, check=True, cwd=folder)
    calls = [file.read_text().split("\0")[:-1] for file in folder.glob("calls.*")]
    return sorted(calls, key=lambda call: value(call, "--local-addr"))


def value(words: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


def test_a_slurm_script_has_directives_that_sbatch_takes(script) -> None:
    options = ["--partition", "gpu", "--account", "lab", "--memory", "512G", "--keys", "/k y"]
    text = script("slurm", GPUS, "--hosts", "2x4", *options, "--setup", "source .venv/bin/activate")
    check_shell(text)
    found = directives(text)
    assert all(re.fullmatch(SBATCH[name], given) for name, given in found.items())
    assert found["nodes"] == "2"
    assert found["gpus-per-node"] == "4"
    assert found["partition"] == "gpu"
    assert found["mem"] == "512G"
    assert "gpus-per-node" not in directives(script("slurm", TINY, "--hosts", "2x0", PLAIN))


def test_a_line_break_in_an_option_stays_in_a_comment(script) -> None:
    text = script("slurm", "gsm8k_tiny", *HOSTS, "--", "--task.prompt", "{question}\ntouch /tmp/x")
    before = text[: text.index("#SBATCH")].splitlines()
    assert all(line.startswith("#") for line in before)


def test_each_node_of_a_slurm_job_calls_torchrun_with_its_own_name(script, tmp_path) -> None:
    plain = "--launch.allow-plain-tcp"  # the run's own option, which stays
    text = script("slurm", TINY, "--hosts", "2x0", "--keys", str(tmp_path / "k y"), "--", plain)
    assert "exec torchrun" in text  # a shell that waits for it would be what Slurm signals
    both = 'for n in 0 1; do SLURM_NODEID=$n SLURMD_NODENAME=node$n "$@"; done'
    programs = {
        "scontrol": 'printf "node0\\nnode1\\n"',
        "srun": f'[ "$1" = --cpus-per-task=3 ] || exit 1\nshift 2\n{both}',
        "torchtitan-rl": 'mkdir -p "${@: -1}"; touch made; echo copy this',
    }
    job = "SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node[0-1] SLURM_CPUS_PER_TASK=3"
    text = f"export {job}\n{text}"
    calls = run_script(text, tmp_path, programs)
    assert [value(call, "--rdzv-conf") for call in calls] == ["is_host=1", "is_host=0"]
    for number, call in enumerate(calls):
        assert value(call, "--nnodes") == "2"
        assert value(call, "--rdzv-endpoint") == "node0:29500"
        assert value(call, "--rdzv-id") == "7"
        assert value(call, "--local-addr") == f"node{number}"
        assert call[call.index("-m") :] == [
            *("-m", "torchtitan_rl.launch", TINY, plain, "--checkpoint.resume"),
            *("--launch.keys", str(tmp_path / "k y" / "7-0")),
            *("--launch.interface", f"node{number}"),
        ]
    assert (tmp_path / "made").exists()
    assert not any((tmp_path / "k y").iterdir())  # keys of a job that has ended


def test_each_node_that_ssh_reaches_calls_torchrun_with_its_own_name(script, tmp_path) -> None:
    nodes = ["--nodes", "10.0.0.1", "node b"]
    options = [*nodes, PLAIN, "--folder", str(tmp_path), "--setup", "export SOME='a b'"]
    text = script("ssh", TINY, "--hosts", "2x0", *options, "--", "--name", "it's a run")
    check_shell(text)
    calls = run_script(text, tmp_path, {"ssh": 'shift 4\nbash -c "$*"'})
    assert [value(call, "--rdzv-conf") for call in calls] == ["is_host=1", "is_host=0"]
    assert len({value(call, "--rdzv-id") for call in calls}) == 1
    for node, call in zip(("10.0.0.1", "node b"), calls, strict=True):
        assert value(call, "--rdzv-endpoint") == "10.0.0.1:29500"
        assert call[call.index("-m") :] == [
            *("-m", "torchtitan_rl.launch", TINY, "--name", "it's a run", "--checkpoint.resume"),
            *("--launch.allow-plain-tcp", "--launch.interface", node),
        ]


def test_the_ssh_script_exits_with_the_code_of_a_node_that_failed(script, tmp_path) -> None:
    text = script("ssh", TINY, "--hosts", "2x0", PLAIN, "--nodes", "a", "b")
    (tmp_path / "ssh").write_text('#!/usr/bin/env bash\n[ "$4" = a ] || exit 3\n')
    (tmp_path / "ssh").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash"], input=text, env=environment, text=True).returncode == 3


def pod_of(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Service, Job and the pod's specification of a manifest that fits the schema."""
    service, job = yaml.safe_load_all(text)
    for one in (service, job):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    return service, job, job["spec"]["template"]["spec"]


def test_a_kubernetes_manifest_fits_the_schema_and_its_parts_each_other(script) -> None:
    text = script(
        "kubernetes", GPUS, "--hosts", "2x4", PLAIN, "--name", "sort", "--image", "here/rl:1"
    )
    service, job, pod = pod_of(text)
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )
    assert pod["subdomain"] == service["metadata"]["name"] == "sort"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = pod["containers"]
    assert container["image"] == "here/rl:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    (command,) = container["args"]
    check_shell(f"#!/usr/bin/env bash\nJOB_COMPLETION_INDEX=0\n{command}")
    assert "--launch.allow-plain-tcp" in command
    assert "nvidia.com/gpu" not in script("kubernetes", TINY, "--hosts", "2x0", PLAIN)


def test_each_pod_calls_torchrun_with_its_own_name(script, tmp_path) -> None:
    _, _, pod = pod_of(script("kubernetes", TINY, "--hosts", "2x0", PLAIN, "--name", "sort"))
    (command,) = pod["containers"][0]["args"]
    both = f"for n in 0 1; do JOB_COMPLETION_INDEX=$n bash -euc {shlex.quote(command)}; done"
    calls = run_script(both, tmp_path, {})
    assert [value(call, "--local-addr") for call in calls] == ["sort-0.sort", "sort-1.sort"]
    assert [value(call, "--rdzv-conf") for call in calls] == ["is_host=1", "is_host=0"]
    assert {value(call, "--rdzv-endpoint") for call in calls} == {"sort-0.sort:29500"}


def test_the_keys_of_pods_are_files_of_their_own_folder(script) -> None:
    text = script("kubernetes", TINY, "--hosts", "2x0", "--name", "sort", "--keys", "keys")
    _, _, pod = pod_of(text)
    secret = pod["volumes"][-1]["secret"]
    assert secret["defaultMode"] == 0o400
    paths = {item["key"]: item["path"] for item in secret["items"]}
    assert paths["1.key.pem"] == "1/key.pem"
    made = dict(re.findall(r"--from-file=(\S+?)=(\S+)", text))
    assert made.keys() == paths.keys()
    assert made["1.key.pem"] == "keys/sort-1.sort/key.pem"
    assert "keys --hosts sort-0.sort sort-1.sort --output keys" in text
    assert "--launch.keys /keys" in pod["containers"][0]["args"][0]


def test_a_compose_file_fits_the_specification(script) -> None:
    text = script("docker-compose", GPUS, "--hosts", "2x4", "--keys", "./keys")
    compose_spec.PyCompose.from_yaml(text).validate()
    services = yaml.safe_load(text)["services"]
    assert list(services) == ["host0", "host1", "controller"]
    command = services["controller"]["command"]
    place = command.index("--launch.attach")
    assert command[place + 1 : place + 3] == ["tls://host0:26600", "tls://host1:26600"]
    assert services["host1"]["command"][2:4] == ["--address", "tls://host1:26600"]
    assert "./keys/host1:/keys:ro" in services["host1"]["volumes"]
    (devices,) = services["host1"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["4", "5", "6", "7"]
    assert set(services["controller"]["depends_on"]) == {"host0", "host1"}


def test_a_compose_file_keeps_dollar_signs_of_images_and_folders(script) -> None:
    odd = ("--image", "$X/a:1", "--outputs", "/o$Y", "--keys", "/k$Z")
    service = yaml.safe_load(script("docker-compose", TINY, "--hosts", "2x0", *odd))["services"]
    assert service["host0"]["image"] == "$$X/a:1"
    assert service["host0"]["volumes"] == ["/o$$Y:/outputs", "/k$$Z/host0:/keys:ro"]


@pytest.mark.parametrize("further", [(), (PLAIN,)])
def test_keys_do_not_encrypt_a_trainer_on_several_hosts(further, capsys) -> None:
    words = ("slurm", GPUS, "--hosts", "4x4", "--keys", "k", *further)
    assert main(["launch-script", *words, "--", "--trainer.data-parallel-shard", "8"]) == 2
    assert "trainer ranks on host2, host3 would exchange" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", TINY, "--hosts", "many"], "--hosts is 'many': give NUMBERxDEVICES"),
        (["slurm", TINY, "--hosts", "2x0"], "--keys is not set: make keys with "),
        (["slurm", GPUS, "--hosts", "2x1", PLAIN], "generator.replicas is 4: "),
        (["slurm", "no_such", "--hosts", "2x1"], "CONFIG is no_such: there is no such file"),
        (["ssh", TINY, *HOSTS, "--nodes", "a"], "--nodes has 1 name and --hosts 2 hosts: "),
        (["kubernetes", TINY, *HOSTS, "--name", "A_b"], "--name is 'A_b': give at most"),
        (["docker-compose", TINY, *HOSTS, "--name", "My run"], "--name is 'My run': give small"),
        (["slurm", TINY, *HOSTS, "--name", "my run"], "--name is 'my run': give one word"),
        (["slurm", TINY, *HOSTS, "--partition", "a b"], "--partition is 'a b': give one word"),
        (["slurm", TINY, *HOSTS, "--time", "1 hour"], "--time is '1 hour': give HOURS:"),
        (["slurm", TINY, *HOSTS, "--image", "x"], "Unrecognized options: --image"),
        (["slurm", TINY, *HOSTS, "--port", "99999"], "--port is 99999: give 1 to 65535"),
        (["slurm", TINY, *HOSTS, "--cpus", "-3"], "--cpus is -3: give 0 to "),
        (["slurm", TINY, *HOSTS, "--", "--num-step", "1"], "Unrecognized options: --num"),
        (["slurm", TINY, *HOSTS, "--", "--launch.trainer-hosts", "5"], "launch.trainer_hosts is "),
        (["slurm", TINY, *HOSTS, "--", "--launch.attach", "tls://a:1"], "launch.attach is "),
        (["slurm", TINY, *HOSTS, "--", "--launch.keys", "k"], "launch.keys is k: the script"),
        (["slurm", TINY, *HOSTS, "--", "--trainer.data-parallel-shard", "0"], "trainer.data_par"),
        (["slurm", TINY, *HOSTS, "--", "--schedule.staleness", "-4"], "schedule.staleness is -4"),
    ],
)
def test_what_cannot_be_is_one_line_with_exit_code_2(words, message, capsys) -> None:
    assert main(["launch-script", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


ODD = (
    "it's",
    'say "hi"',
    "two  words",
    "a\nb\n\nc",
    "$HOME ${X} $(pwd) `pwd` $$ $$(X)",
    "~/x",
    "\\n\\",
    "Zürich 東",
)


def test_options_mean_the_same_in_every_script(script, tmp_path) -> None:
    options = [word for number, odd in enumerate(ODD) for word in (f"--x{number}", odd)]
    job = Job(
        command=shlex.join(options),
        config="my config's.py",
        options=tuple(options),
        name="odd",
        num_hosts=2,
        devices=0,
        cpus=2,
    )
    slurm = "export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n SLURM_CPUS_PER_TASK=3 SLURM_NODEID=0\n"
    slurm += f"export SLURMD_NODENAME=n\n{slurm_script(job, SlurmOptions())}"
    _, _, pod = pod_of(kubernetes_manifest(job, KubernetesOptions()))
    command = pod["containers"][0]["args"][0].replace("$$", "$")  # as Kubernetes does
    texts = {
        "slurm": slurm,
        "ssh": ssh_script(job, SshOptions(nodes=("a", "b"))),
        "kubernetes": f"JOB_COMPLETION_INDEX=0 bash -euc {shlex.quote(command)}",
    }
    programs = {
        "scontrol": "echo n",
        "srun": 'shift 2\n"$@"',
        "ssh": 'shift 4\nsh -c "$*"',  # a login shell that is not bash
    }
    said = ["my config's.py", *options]
    for kind, text in texts.items():
        folder = tmp_path / kind
        folder.mkdir()
        call = run_script(text, folder, dict(programs))[0]
        words = [word for word in call if word not in ("--output-dir", "/outputs")]
        place = words.index("torchtitan_rl.launch") + 1
        assert words[place : place + len(said)] == said
    composed = yaml.safe_load(compose_file(job, ComposeOptions()))["services"]["controller"]
    assert "$" not in "".join(composed["command"]).replace("$$", "")  # which Compose substitutes
    words = [word.replace("$$", "$") for word in composed["command"]]
    assert [word for word in words if word not in ("--output-dir", "/outputs")][2:19] == said


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ssh", "docker-compose"])
def test_every_kind_has_a_help(kind, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch-script", kind, "--help"])
    assert ended.value.code == 0
    assert "--hosts" in capsys.readouterr().out


EXAMPLES = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix != ".md")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_what_the_command_in_it_prints(example, script) -> None:
    text = example.read_text()
    command = next(line for line in text.splitlines() if "torchtitan-rl launch-script" in line)
    assert script(*shlex.split(command.lstrip("# "))[2:]) == text


def test_there_is_an_example_of_each_kind() -> None:
    kinds = {re.findall(r"launch-script (\S+)", path.read_text())[0] for path in EXAMPLES}
    assert kinds == {"slurm", "kubernetes", "ssh", "docker-compose"}
