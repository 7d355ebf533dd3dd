"""The command line. It sets Monarch's environment first, because a user's module may import
Monarch."""

import torchtitan_rl.backends.monarch  # noqa: F401
