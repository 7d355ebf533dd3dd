"""The command line. A user's module, which it imports, may import Monarch: ours comes first."""

import torchtitan_rl.backends.monarch  # noqa: F401
