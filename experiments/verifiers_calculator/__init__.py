"""An environment of verifiers, written as its users write theirs: word problems and a calculator.

`calculator_v1.py` is the environment; it knows nothing of this project. `configs/verifiers_tiny.py`
trains on it, beginning with the policy of `experiments/calculator_agent`, whose words it uses.
"""
