"""Word problems that lack a number, solved with the agent libraries that people use."""
