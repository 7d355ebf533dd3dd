#!/usr/bin/env bash
# A script for SSH of a torchtitan-rl run on 2 hosts of 4 CUDA devices each, written by
#   torchtitan-rl launch-script ssh alphabet_sort_qwen3_0_6b --hosts 2x4 --nodes 10.0.0.1 10.0.0.2 --folder /shared/run --setup 'source .venv/bin/activate' --keys /shared/keys
# Run it where SSH reaches all nodes without a password. Ctrl-C stops the run with
# a checkpoint; the same script continues it. Code, policy and outputs are at the
# same paths on all nodes.
# Each host needs room in /dev/shm for all versions of the weights, 3411 MiB.
# The plan (--dry-run prints all of it):
#   device: cuda
#   controller: 1 process on cpu
#   host0: 4 CUDA devices
#     replica0: 1 process on cuda:0, 1 thread each
#     replica1: 1 process on cuda:1, 1 thread each
#     replica2: 1 process on cuda:2, 1 thread each
#     replica3: 1 process on cuda:3, 1 thread each
#   host1: 4 CUDA devices
#     trainer: 2 processes on cuda:0,1, 2 threads each
set -euo pipefail
nodes=(10.0.0.1 10.0.0.2)
run="$(date +%s)-$$"

# What each node runs; it is sent as text.
start() {
  local rank=$1 node=$2 run=$3
  cd /shared/run
  source .venv/bin/activate
  ulimit -S -l "$(ulimit -H -l)"  # RDMA locks memory
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a node that is lost cannot come back
  exec torchrun --nnodes=2 --nproc-per-node=1 \
    --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 --rdzv-id="$run" \
    --rdzv-conf=is_host=$((rank == 0)) --local-addr="$node" \
    --max-restarts=3 --shutdown-timeout=160 \
    -m torchtitan_rl.launch alphabet_sort_qwen3_0_6b \
    --checkpoint.resume --launch.keys /shared/keys --launch.interface "$node"
}

connections=()
for rank in "${!nodes[@]}"; do
  call=$(printf "%q " start "$rank" "${nodes[rank]}" "$run")
  text=$(printf "%s\n" "set -e" "$(declare -f start)" "$call")
  # -tt: with a terminal, the end of the connection reaches the node's processes.
  # Any login shell gives the text, in base64, to bash.
  ssh -tt -o BatchMode=yes "${nodes[rank]}" \
    "echo $(base64 <<<"$text" | tr -d "\n") | base64 -d | bash" </dev/null &
  connections+=($!)
done

stop() { kill -TERM "${connections[@]}" 2>/dev/null || true; }
trap stop INT TERM HUP
code=0
for connection in "${connections[@]}"; do
  while true; do
    wait "$connection" && ended=0 || ended=$?
    kill -0 "$connection" 2>/dev/null || break  # a trapped signal interrupts `wait`
  done
  if ((code == 0)); then code=$ended; fi
done
exit "$code"
