"""FrozenLake of gymnasium on random maps, and a small policy for it."""
