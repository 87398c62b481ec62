"""An engine may run as another user than its sidecar, as root in an image of its own."""

import stat

from kv_sidecar.memory_store import INCOMING, MemoryStore


def test_files_of_an_engine_that_is_root_get_the_sidecars_group(tmp_path):
    """Seen failing without the set-group-id bit: root's files are root's, 0640, and every save is refused."""
    MemoryStore(limit_bytes=1 << 20, shared_directory=tmp_path).open()

    mode = (tmp_path / INCOMING).stat().st_mode

    assert mode & stat.S_ISGID
    assert stat.S_IMODE(mode) & 0o070 == 0o070
    assert not mode & 0o007
