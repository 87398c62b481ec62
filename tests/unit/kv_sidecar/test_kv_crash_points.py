"""The list of crash points is what a sidecar really passes: no more, no less."""

from __future__ import annotations

from pathlib import Path

import pytest

import kv_sidecar
from contextcache.errors import CacheRefNotFound, CorruptBlock
from contextcache.model import Manifest
from kv_sidecar import crash_points
from kv_sidecar.crash_points import POINTS, point_of
from kv_sidecar.format.manifest import block_key
from tests.kit.kv_blocks import TENANT, SidecarUnderTest

NAMES = (
    "BEFORE_SEAL",
    "AFTER_SEAL",
    "BETWEEN_PULLED_BLOCKS",
    "AFTER_STORED_BLOCKS",
    "AFTER_UNSTORED_MANIFEST",
    "AFTER_EVICTED_MANIFEST",
    "AFTER_HANDOVER_NOTE",
    "AFTER_HANDOVER_SEAL",
)
CALLED = {name: getattr(crash_points, name) for name in NAMES}
"""Points that are no steps on disk, by the name they are called with."""
TEN = tuple(range(10))


async def load_is_corrupt(kv: SidecarUnderTest, manifest: Manifest, block_index: int) -> None:
    """Change a stored byte and see it noticed."""
    path = kv.path_of(block_key(manifest, block_index, 0))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBlock):
        async for _ in kv.catalog.load(manifest, manifest.fingerprint, 0, [block_index], in_slots=False):
            pass


async def test_every_step_on_disk_is_a_point_and_every_point_is_a_step(tmp_path: Path) -> None:
    steps: list[str] = []
    async with SidecarUnderTest(tmp_path, step=steps.append, memory_limit_bytes=0) as kv:
        for block_index in (0, 2):  # a whole block, the tail
            new = await kv.save(TEN)
            await load_is_corrupt(kv, kv.plan(new), block_index)
        new = await kv.save(TEN)
        manifest_path = kv.settings.data_dir / "manifests" / new.cache_ref[4:6] / f"{new.cache_ref}.safetensors"
        manifest_path.write_bytes(b"no manifest")
        with pytest.raises(CacheRefNotFound):
            await kv.catalog.open(TENANT, new.cache_ref)
        new = await kv.save(TEN)
        await kv.catalog.delete(TENANT, new.session_id, [])

    assert {point_of(step) for step in steps} == set(POINTS) - set(CALLED.values())


def test_the_other_points_are_called_where_the_code_names_them() -> None:
    sources = [path.read_text() for path in Path(kv_sidecar.__file__).parent.rglob("*.py")]

    for constant in CALLED:
        assert sum(source.count(f"crash_point({constant})") for source in sources) == 1


def test_no_point_is_listed_twice_or_could_not_be_written_on_one_line() -> None:
    assert len(set(POINTS)) == len(POINTS)
    assert not any(character in point for point in POINTS for character in " @\n")
