"""A campaign against the controller: plans and faults drawn from a seed, invariants checked after
each life of a run. `python -m tests.campaign SEED` shows one case."""
