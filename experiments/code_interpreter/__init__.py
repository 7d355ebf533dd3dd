"""Questions about numbers that a policy answers by running programs."""
