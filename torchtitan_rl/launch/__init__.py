"""Starting a run on several hosts: addresses, keys, torchrun, scripts for schedulers."""
