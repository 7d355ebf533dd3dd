"""An ordinary environment of the verifiers library: word problems and a calculator.

`calculator_v1.py` is the environment; it imports nothing of this project.
`configs/verifiers_tiny.py` trains the policy of `experiments/calculator_agent` on this environment;
both experiments use the same words.
"""
