"""Makes ``python benchmarks/NAME.py`` the same as ``python -m benchmarks.NAME``: Python looks for
the package in the script's folder, finds this module, and gets the repository instead."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])
__path__ = [str(Path(__file__).parent)]
