"""A temporary folder that is closed to others, for whoever runs."""

from __future__ import annotations

import os
import stat
import tempfile

from tests.support.other_user import as_other_user, needs_root
from torchtitan_rl.launch.own_user import use_private_folder


@needs_root
def test_a_user_without_a_name_and_a_home_folder_has_one_as_well() -> None:
    def make() -> str:
        for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ.pop(name, None)
        tempfile.tempdir = None
        folder = use_private_folder()
        assert os.environ["TMPDIR"] == str(folder)
        return f"{stat.S_IMODE(folder.stat().st_mode):o}"

    assert as_other_user(make) == "700"
