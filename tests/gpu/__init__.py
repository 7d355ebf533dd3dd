"""Tests of the installed device: CUDA, or a CPU, which then shows that the tests themselves work.

On CUDA, `make test` runs them after `tests/fast`; they take about 5 minutes there (an estimate:
nobody has run them on a GPU yet). What needs two devices, or only CUDA has, is skipped elsewhere.
"""
