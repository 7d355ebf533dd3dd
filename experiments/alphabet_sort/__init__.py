"""Names to sort over several turns, and a small policy that can do this only moderately well."""
