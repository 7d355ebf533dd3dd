"""The machines of a run: their addresses and keys, where they listen, and which of them owns the
run's folder."""
