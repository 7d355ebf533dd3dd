"""What runs in each process that Monarch starts: Monarch's module of this name, loaded as `closed`
says."""

import runpy

if __name__ == "__main__":
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
