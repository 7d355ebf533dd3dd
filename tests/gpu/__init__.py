"""Tests of the installed device: CUDA, or a CPU, which then shows that the tests themselves work.

On CUDA, `make test` runs them after `tests/fast`; they take about 5 minutes there (an estimate:
they have not been run on a GPU yet). Tests that need two devices or CUDA are skipped elsewhere.
"""
