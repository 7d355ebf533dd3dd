"""Word problems for an agent with a calculator, and a small policy that solves some of them."""
