"""Runs in each process that Monarch starts: runs Monarch's module of the same name, which is loaded
as described in `closed`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
