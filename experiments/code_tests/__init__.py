"""Programs that a policy writes, scored by tests that run in the sandbox."""
