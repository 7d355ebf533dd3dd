"""``torchrun --nnodes=N --nproc-per-node=1 ... -m torchtitan_rl.launch CONFIG [options]``: what
`commands/torchrun.py` does, under a shorter name."""

import runpy

runpy.run_module("torchtitan_rl.commands.torchrun", run_name="__main__")
