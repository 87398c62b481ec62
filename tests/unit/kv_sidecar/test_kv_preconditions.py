"""What a sidecar's container is too small for is told at the start."""

from pathlib import Path

import pytest

from kv_sidecar import settings as sidecar_settings
from kv_sidecar.settings import SidecarSettings

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_settings, "_CONTAINER", tmp_path)


def told(tmp_path: Path, *, limit: str | None, memory_bytes: int = GIB, disk_limit_bytes: int = 1) -> list[str]:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    settings = SidecarSettings(memory_limit_bytes=memory_bytes, disk_limit_bytes=disk_limit_bytes, data_dir=tmp_path)
    return list(settings.shortages())


@pytest.mark.parametrize("limit", [None, "max\n", f"{3 * GIB // 2}\n"])
def test_a_container_with_room_is_told_nothing(tmp_path: Path, limit: str | None) -> None:
    assert told(tmp_path, limit=limit) == []


def test_a_memory_limit_below_arena_and_process_is_told(tmp_path: Path) -> None:
    (said,) = told(tmp_path, limit=f"{3 * GIB // 2 - 1}\n")

    assert "may kill the container" in said
    assert str(3 * GIB // 2) in said


def test_a_filesystem_smaller_than_the_disk_limit_is_told(tmp_path: Path) -> None:
    (said,) = told(tmp_path, limit=None, disk_limit_bytes=1 << 62)

    assert "SIDECAR_DISK_LIMIT_BYTES" in said
