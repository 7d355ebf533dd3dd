#!/usr/bin/env bash
# A Slurm script of a torchtitan-rl run on 2 hosts of 4 CUDA devices each, written by
#   torchtitan-rl launch-script slurm alphabet_sort_qwen3_0_6b --hosts 2x4 --partition gpu --time 12:00:00 --setup 'source .venv/bin/activate' --keys /shared/keys -- --output-dir /shared/outputs
# Start it with `sbatch FILE`; `sbatch --test-only FILE` only checks it. Submitted
# again, or requeued, it continues the run.
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
#SBATCH --job-name=alphabet-sort-qwen3-0-6b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180
#SBATCH --requeue
set -euo pipefail
source .venv/bin/activate

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RANK_0="${nodes[0]}"
# Keys for the nodes of this job; all nodes must see the folder, and no other user.
rm -rf /shared/keys/"$SLURM_JOB_ID"-*  # of a start that was killed
KEYS=/shared/keys/"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
export KEYS
trap 'rm -rf "$KEYS"' EXIT
trap : TERM  # the end of srun comes first
torchtitan-rl keys --hosts "${nodes[@]}" --output "$KEYS" --quiet

# torchrun on each node; a launcher starts the processes of its node.
run() {
  ulimit -S -l "$(ulimit -H -l)"  # RDMA locks memory
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a node that is lost cannot come back
  exec torchrun --nnodes=2 --nproc-per-node=1 \
    --rdzv-backend=c10d --rdzv-endpoint=$RANK_0:29500 --rdzv-id=$SLURM_JOB_ID \
    --rdzv-conf=is_host=$((SLURM_NODEID == 0)) --local-addr="$SLURMD_NODENAME" \
    --max-restarts=3 --shutdown-timeout=160 \
    -m torchtitan_rl.launch alphabet_sort_qwen3_0_6b \
    --output-dir /shared/outputs --checkpoint.resume --launch.keys "$KEYS" --launch.interface "$SLURMD_NODENAME"
}
export -f run
# srun does not take the number of cores from the job by itself.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 bash -c run
