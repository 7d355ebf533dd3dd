"""Runs Monarch's module of the same name, in each process that Monarch starts. This package is
imported before that module, so that other users cannot connect to Monarch's sockets."""

import runpy

if __name__ == "__main__":
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
