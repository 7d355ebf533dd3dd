"""Monarch: actors, meshes, RDMA. Import Monarch after this package; see `closed`."""

import sys

from torchtitan_rl.backends.monarch.closed import MODULE, MonarchFinder

if MODULE in sys.modules:
    raise ImportError("import torchtitan_rl.backends.monarch before monarch, to close its sockets")
sys.meta_path.insert(0, MonarchFinder)
