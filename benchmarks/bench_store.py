"""How fast KV goes to the shared store and comes from it, in GB/s, beside the same bytes copied with the same library.

One sidecar in process, contexts of its own making, a directory and a real S3 server on loopback, each with and without
encryption. Each round takes everything once, over new bytes: obstore's own puts and gets, as many at a time as the
tier has; then the tier: contexts saved to disk are written behind (holders, sizes asked for, blocks, manifests), and
their blocks are fetched as a pull fetches them. Not in it: verifying and the disk of who pulls, which a restore from
there waits for as well (bench_transfer.py has both), and an engine. The S3 server is Python and copies what it is sent:
against it the library is slow too.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.result import parser_of, write_result
from contextcache.clock import SystemClock
from contextcache.model import CacheRef
from contextcache.names import new_cache_ref
from deploy.local import s3_server
from deploy.local.ports import LOOPBACK
from deploy.local.table import render
from kv_sidecar.client import BlockFileWriter
from kv_sidecar.format.manifest import block_meta, num_files
from kv_sidecar.moving.peer import StoredPeer
from kv_sidecar.saves import NewSave
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.sidecar import Sidecar
from kv_sidecar.store.objects import ObjectStore
from kv_sidecar.store.writer import SharedTier

TENANT = "demo"
BLOCK_TOKENS, PAGES_BYTES = 256, 256 * (128 << 10)
"""A block file of an 8B model: 128 KiB of KV a token."""
BLOCKS = 8
"""Of one context."""
AT_ONCE = 4
"""As the tier has them on their way."""
BAR = 0.7
Figures = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class World:
    """A sidecar over a store, and that store by itself."""

    sidecar: Sidecar
    shared: SharedTier
    objects: ObjectStore


def key_file(directory: Path) -> Path:
    """Write a file with one key for all."""
    path = directory.with_suffix(".keys")
    path.write_text(json.dumps({"*": [{"id": "1", "key": base64.b64encode(os.urandom(32)).decode()}]}))
    return path


@asynccontextmanager
async def world(url: str, directory: Path, *, encrypted: bool) -> AsyncIterator[World]:
    """Run a sidecar whose files lie under `directory`."""
    settings = SidecarSettings(
        listen=f"{LOOPBACK}:0",
        data_dir=directory / "data",
        memory_limit_bytes=0,
        store_url=url,
        store_keys_file=key_file(directory) if encrypted else None,
    )
    sidecar = Sidecar(settings, clock=SystemClock(), registry=CollectorRegistry())
    await sidecar.open()
    assert sidecar.shared is not None
    try:
        yield World(sidecar, sidecar.shared, ObjectStore(url, timeout_s=60))
    finally:
        await sidecar.close()


async def saved(sidecar: Sidecar, seed: int) -> CacheRef:
    """Save a context of new blocks to disk."""
    new = NewSave(
        tenant=TENANT,
        session_id=f"ctx_{seed}",
        cache_ref=new_cache_ref(),
        fingerprint="f" * 64,
        rank=0,
        world_size=1,
        token_ids=tuple(range(seed, seed + BLOCKS * BLOCK_TOKENS)),
        expires_at_ms=SystemClock().now_ms() + 3_600_000,
    )
    prepared = await sidecar.catalog.prepare_save(new)
    ref = sidecar.catalog.refs.owner(new.cache_ref)
    assert ref is not None, "prepared"
    assert ref.save is not None, "prepared"
    for index in prepared.missing_files:
        writer = BlockFileWriter(block_meta(ref.save.manifest, index, 0), pages_bytes=PAGES_BYTES)
        writer.begin(memoryview(bytearray(writer.size_bytes)))
        writer.pages[:] = np.frombuffer(os.urandom(PAGES_BYTES), np.uint8)
        await sidecar.catalog.take_block(new.cache_ref, 0, index, bytes(writer.finish()))
    await sidecar.catalog.seal(new.cache_ref, 0)
    return new.cache_ref


async def copied(objects: ObjectStore, seed: int) -> tuple[float, float]:
    """Return the seconds in which the library alone puts the same bytes, and gets them."""
    data = [os.urandom(PAGES_BYTES) for _ in range(BLOCKS)]
    slots = asyncio.Semaphore(AT_ONCE)

    async def put(index: int) -> None:
        async with slots:
            await objects.put(f"plain/{seed}/{index}", data[index])

    async def get(index: int) -> None:
        async with slots:
            assert await objects.get(f"plain/{seed}/{index}", limit_bytes=1 << 30)

    began_s = time.perf_counter()
    await asyncio.gather(*map(put, range(BLOCKS)))
    put_s = time.perf_counter()
    await asyncio.gather(*map(get, range(BLOCKS)))
    return put_s - began_s, time.perf_counter() - put_s


async def stored(it: World, seed: int) -> tuple[float, float]:
    """Return the seconds in which a context is written behind, and those in which its blocks come back."""
    # Written when it is told to, and not behind the seal: saving it is no part of this.
    await it.shared.close()
    cache_ref = await saved(it.sidecar, seed)
    began_s = time.perf_counter()
    it.shared.start()
    assert await it.shared.flush(600) == 0
    written_s = time.perf_counter()
    peer = StoredPeer(it.shared, slots=asyncio.Semaphore(AT_ONCE))
    manifest = await peer.manifest(TENANT, cache_ref)
    async with aclosing(peer.block_files(manifest, 0, range(num_files(manifest)))) as files:
        async for file in files:
            file.release()
    return written_s - began_s, time.perf_counter() - written_s


async def measure(urls: dict[str, str], directory: Path, rounds: int) -> dict[str, Figures]:
    """Return GB/s by store and what was done, of each round."""
    found: dict[str, Figures] = {}
    for store, url in urls.items():
        figures = found[store] = {}
        async with (
            world(f"{url}/plain", directory / f"{store}-plain", encrypted=False) as plain,
            world(f"{url}/encrypted", directory / f"{store}-encrypted", encrypted=True) as encrypted,
        ):
            for seed in range(0, (rounds + 1) * BLOCKS * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS):
                for name, taken in (
                    ("copy", await copied(plain.objects, seed)),
                    ("store", await stored(plain, seed)),
                    ("encrypted", await stored(encrypted, seed)),
                ):
                    for way, seconds in zip(("write", "read"), taken, strict=True):
                        rate = BLOCKS * PAGES_BYTES / seconds / 1e9
                        # The first round touches the memory and opens the connections.
                        figures.setdefault(f"{name}, {way}", []).extend([round(rate, 4)] if seed else [])
    return found


def table(found: dict[str, Figures]) -> str:
    """Return the medians for a person, and what part of the copy they are."""
    rows = []
    for store, figures in found.items():
        for name, rates in figures.items():
            copy = statistics.median(figures[f"copy, {name.rpartition(' ')[2]}"])
            rows.append([store, name, f"{statistics.median(rates):.2f}", f"{statistics.median(rates) / copy:.0%}"])
    return render(["store", "what", "GB/s", "of the copy"], rows)


def rows(found: dict[str, Figures]) -> list[dict[str, Any]]:
    """Return the rates of each store and way, and whether the tier reaches its share of the copy."""
    kept = []
    for store, figures in found.items():
        for name, rates in figures.items():
            kind, _, way = name.partition(", ")
            copy = statistics.median(figures[f"copy, {way}"])
            gb_s = statistics.median(rates)
            met = gb_s >= BAR * copy if kind == "store" else None
            rate = {"gb_s": gb_s, "gb_s_range": [min(rates), max(rates)], "met": met}
            kept.append({"store": store, "what": kind, "way": way, **rate})
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the figures."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each store")
    parser.add_argument("--port", type=int, default=9290, help="of the S3 server on loopback; 0: a directory alone")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-store-") as name:
        directory = Path(name)
        urls = {"directory": f"file://{directory}/store"}
        server = None
        try:
            if asked.port:
                command = [str(s3_server.installed()), "-H", LOOPBACK, "-p", str(asked.port)]
                server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                os.environ.update(s3_server.environment(asked.port))
                until_s = time.monotonic() + 60
                while not s3_server.has_bucket(asked.port):
                    assert time.monotonic() < until_s, "the S3 server does not answer"
                    time.sleep(0.2)
                urls["s3 server"] = f"s3://{s3_server.BUCKET}/bench"
            found = asyncio.run(measure(urls, directory, asked.rounds))
        finally:
            if server is not None:
                server.kill()
                server.wait()
    print(table(found))
    versions = {package: version(package) for package in ("obstore", "cryptography")}
    report = {"rounds": asked.rounds, "block_bytes": PAGES_BYTES, "blocks": BLOCKS, "versions": versions}
    write_result(asked.out, report | {"bar": BAR, "rows": rows(found)})


if __name__ == "__main__":
    main()
