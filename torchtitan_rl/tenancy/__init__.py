"""Several training runs with adapters on the engines of one ``torchtitan-rl serve``."""
