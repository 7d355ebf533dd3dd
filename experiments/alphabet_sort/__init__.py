"""Names to sort over several turns, and a small policy that starts mediocre at it."""
