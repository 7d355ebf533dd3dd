"""Word problems for an agent with a calculator, and a small policy that starts mediocre at them."""
