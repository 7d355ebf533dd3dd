"""Two tasks of reasoning-gym, sums and spelling backward, and a small policy for them."""
