"""Machines of a run: their addresses, and the keys that protect what they send to each other."""
