"""Makes ``python benchmarks/NAME.py`` work like ``python -m benchmarks.NAME``. Python looks for the
package ``benchmarks`` in the script's folder, and finds this module. It replaces the script's
folder in the import path by the repository, and acts as the package itself."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])
__path__ = [str(Path(__file__).parent)]
