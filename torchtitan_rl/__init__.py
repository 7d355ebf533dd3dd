"""RL post-training for PyTorch: torchtitan trains, vLLM generates, Monarch orchestrates."""

__version__ = "0.1.0"
