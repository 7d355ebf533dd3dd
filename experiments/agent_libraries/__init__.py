"""Word problems that lack a number, solved with widely used agent libraries."""
