"""``torchrun --nnodes=N --nproc-per-node=1 ... -m torchtitan_rl.launch CONFIG [options]``: a
shorter name for `commands/torchrun.py`."""

import runpy

runpy.run_module("torchtitan_rl.commands.torchrun", run_name="__main__")
