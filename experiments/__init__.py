"""Tasks that train with torchtitan_rl, one folder each."""
