"""A kept conversation outlives its pod: real sidecars over one directory, the first one killed, its disk removed."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from contextcache.clock import SystemClock
from contextcache.model import CacheRef
from contextcache.names import KEPT_PREFIX
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.store.collector import COLLECTOR
from tests.integration.test_sidecar_process import SidecarProcess
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import FINGERPRINT, TENANT
from tests.kit.until import wait_until

GROUP = f"{KEPT_PREFIX}{'1' * 32}"
TURNS = [tuple(range(1, 11)), tuple(range(1, 24)), tuple(range(1, 41))]
"""Each begins with the one before."""
NEXT = (*TURNS[-1], *range(100, 110))


class Pod:
    """A sidecar process and one engine rank beside it."""

    def __init__(self, directory: Path, store: Path) -> None:
        directory.mkdir()
        self.sidecar = SidecarProcess(directory)
        self.sidecar.start(SIDECAR_STORE_URL=f"file://{store}")
        self.rank = EngineRank(self.sidecar.address)

    def find(self, wait_ms: int = 30_000) -> CacheRef | None:
        """Ask as the engine does before the conversation's next turn."""
        question = pb.ResolveRequest(
            tenant=TENANT,
            fingerprint=FINGERPRINT,
            world_size=1,
            token_ids=pack_token_ids(NEXT),
            tokens_min=4,
            pull_wait_ms=wait_ms,
            expires_at_ms=SystemClock().now_ms() + 60_000,
            group=GROUP,
        )
        manifest, _ = self.rank.client.resolve(question, 60)
        return None if manifest is None else manifest.cache_ref

    def close(self) -> None:
        if self.sidecar.process is not None:
            self.rank.close()
            self.sidecar.end(signal.SIGKILL)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def objects(store: Path) -> set[str]:
    return {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()} - {COLLECTOR}


def named(store: Path, kind: str) -> set[str]:
    return {name.rpartition("/")[2] for name in objects(store) if f"/{kind}/" in name}


def has_alone(store: Path, cache_ref: str) -> bool:
    """Return whether a turn is written, and nothing is left of those before: their names under the session go last."""
    return named(store, "manifests") == named(store, "sessions") == {cache_ref}


async def test_a_kept_conversation_is_found_by_another_pod_and_its_delete_leaves_no_object(
    tmp_path: Path, stack: ExitStack
) -> None:
    store = tmp_path / "store"
    first = Pod(tmp_path / "a", store)
    stack.callback(first.close)
    kept = [first.rank.save(tokens, session_id=GROUP) for tokens in TURNS][-1]
    # A pod killed while it removes the others leaves some of their blocks to the collector.
    wait_until(lambda: has_alone(store, kept.cache_ref), what="the store has the last turn alone")
    first.close()
    shutil.rmtree(tmp_path / "a")

    second = Pod(tmp_path / "b", store)
    stack.callback(second.close)
    wait_until(lambda: second.find() == kept.cache_ref, what="it has come", deadline_s=60)
    assert second.rank.load(kept) == {pb.TIER_OBJECT}
    assert second.find(wait_ms=0) == kept.cache_ref

    longer = second.rank.save(NEXT, session_id=GROUP)
    wait_until(lambda: longer.cache_ref in named(store, "manifests"), what="the next turn is written")
    client = KVSidecarClient(second.sidecar.address, timeout_s=60)
    await client.delete_context(TENANT, session_id=GROUP)
    await client.close()
    assert objects(store) == set()
