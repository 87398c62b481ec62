"""What bench_scale measures: sidecars over directories of many contexts, and contexts of growing length in one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_transfer import SEALED, SHAPES, TENANT, Bench, Rank, Shape
from benchmarks.front.process_figures import cpu_seconds, resident_bytes
from benchmarks.processes import Processes
from contextcache.model import Manifest
from contextcache.names import new_cache_ref
from deploy.local.readiness import grpc_serves
from kv_sidecar.client import (
    TIER_NAMES,
    BlockFileWriter,
    EngineSidecarClient,
    KVSidecarClient,
    parse_block_file,
    with_files,
)
from kv_sidecar.format.ids import BlockKey, fan_out
from kv_sidecar.format.manifest import block_key, block_meta, encode_manifest

SHAPE_OF = {"tokens, 8B": SHAPES["llama3-8b"], "tokens, long": Shape(1, 1, 4, 16)}
TINY, CONTEXT_TOKENS, BLOCK_TOKENS = Shape(1, 1, 4, 16), 48, 32
LIFE_MS = 86_400_000
DRAWS, QUESTIONS = 5, 50
"""Contexts a round of one sidecar; look-ups while the collector passes."""
SETTLED_S = 0.3
"""Without work for so long: the collector's pass is over."""


class Template:
    """A context as a sidecar saved it: what others are made from."""

    def __init__(self, processes: Processes) -> None:
        world = World(processes, "template", 0, 1)
        world.start()
        world.join()
        cache_ref = new_cache_ref()
        world.rank.save(cache_ref, range(CONTEXT_TOKENS))
        self._manifest, _ = world.client.get_manifest(TENANT, cache_ref, 10)
        files = [world.path(block_key(self._manifest, at, 0)) for at in range(len(self._manifest.files))]
        self._pages = [bytes(parse_block_file(file.read_bytes()).pages) for file in files]
        world.leave()

    def write(self, world: World, number: int, tenant: str) -> None:
        """Write another context to a sidecar's directory, as it would write it; the sidecar is not running."""
        token_ids = (1000 + number, *self._manifest.token_ids[1:])
        manifest = replace(self._manifest, cache_ref=_ref(number), tenant=tenant, session_id=_session(number))
        expires_at_ms = round(time.time() * 1000) + LIFE_MS
        manifest = with_files(replace(manifest, token_ids=token_ids, expires_at_ms=expires_at_ms, files=()))
        checksums, size_bytes = [], 0
        for at, pages in enumerate(self._pages):
            writer = BlockFileWriter(block_meta(manifest, at, 0), pages_bytes=len(pages))
            writer.begin(memoryview(bytearray(writer.size_bytes)))
            writer.pages[:] = np.frombuffer(pages, dtype=np.uint8)
            file = writer.finish()
            checksums.append(parse_block_file(file).checksum)
            size_bytes += len(file)
            _write(world.path(block_key(manifest, at, 0)), file)
        manifest = replace(manifest, block_checksums=tuple(checksums), size_bytes=size_bytes)
        _write(world.manifest_path(manifest), encode_manifest(manifest))


class World:
    """A sidecar with so many contexts of so many tenants."""

    def __init__(self, processes: Processes, name: str, num_contexts: int, num_tenants: int) -> None:
        self.name, self._processes = name, processes
        self._num_contexts, self._num_tenants = num_contexts, num_tenants
        self._directory = processes.directory / name.replace(" ", "-")
        self._data = self._directory / "data"
        self._directory.mkdir()
        self._address = f"unix://{self._directory}/sidecar.sock"
        self._drawn = iter(random.Random(num_contexts).sample(range(num_contexts), num_contexts))
        self._num_saved = 0

    def fill(self, template: Template) -> None:
        """Write the contexts' files."""
        for number in range(self._num_contexts):
            template.write(self, number, self._tenant(number))

    def start(self, *, collect_interval_s: float = 86_400) -> tuple[float, int]:
        """Start the sidecar, anew when it runs; return the seconds until it served, and its memory when it is idle."""
        if self.name in self._processes.names:
            self._processes.end(self.name)
        env = {
            "SIDECAR_UNIX_SOCKET": self._address.removeprefix("unix://"),
            "SIDECAR_LISTEN": "",
            "SIDECAR_DATA_DIR": str(self._data),
            "SIDECAR_MEMORY_LIMIT_BYTES": str(16 << 20),
            "SIDECAR_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "SIDECAR_COLLECT_INTERVAL_S": str(collect_interval_s),
        }
        command, is_ready, began_s = (
            (sys.executable, "-m", "kv_sidecar"),
            partial(grpc_serves, self._address),
            time.time(),
        )
        self._processes.start(self.name, command, is_ready, env=env, within_s=300)
        pid = self._processes.pid(self.name)
        if collect_interval_s <= SETTLED_S:
            return 0.0, 0
        cpu_s = -1.0
        while cpu_s < (cpu_s := cpu_seconds(pid)) - 0.01:
            time.sleep(SETTLED_S)
        return self._served_at_s() - began_s, resident_bytes(pid)

    def join(self) -> None:
        """Let an engine's rank come."""
        self.client = EngineSidecarClient(self._address, timeout_s=60)
        self.rank = Rank(self._address, TINY, CONTEXT_TOKENS)
        if asyncio.run(self._asked(lambda client: client.stats())).num_contexts != self._num_contexts:
            raise RuntimeError("the sidecar does not know all contexts")

    def leave(self) -> None:
        """Let it go, and end the sidecar."""
        self.rank.side.shutdown()
        self.client.close()
        self._processes.end(self.name)

    def measure(self) -> Iterator[tuple[str, float]]:
        """Take everything a few times; yield what, and the ms it took."""
        for _ in range(DRAWS):
            number = next(self._drawn)
            began_s = time.perf_counter()
            manifest, tier = self.client.get_manifest(self._tenant(number), _ref(number), 10)
            yield "look-up", _ms_since(began_s)
            if TIER_NAMES[tier] != "disk":
                raise RuntimeError("a context was loaded before")
            for source in ("disk", "memory"):
                yield f"load from {source}", self.rank.load(manifest, verify=False) * 1000
            saved = new_cache_ref()
            self._num_saved += 1
            token_ids = [1000 + self._num_contexts + self._num_saved, *range(1, CONTEXT_TOKENS)]
            yield "save, until sealed", self.rank.save(saved, token_ids)[SEALED] * 1000
            yield from asyncio.run(self._timed(number, saved))

    async def _timed(self, number: int, saved: str) -> list[tuple[str, float]]:
        client, taken = KVSidecarClient(self._address, timeout_s=60), []
        await client.stats()
        tenant, until_ms = self._tenant(number), round(time.time() * 1000) + LIFE_MS
        for what, call in (
            ("stats", client.stats()),
            ("usage of a tenant", client.tenant_usage(tenant)),
            ("touch", client.touch_context(tenant, _session(number), until_ms)),
            ("delete", client.delete_context(TENANT, cache_refs=[saved])),
        ):
            began_s = time.perf_counter()
            if not await call:
                raise RuntimeError(f"{what}: nothing was done")
            taken.append((what, _ms_since(began_s)))
        await client.close()
        return taken

    def longest_questions_ms(self, times: int) -> list[float]:
        """Return, so many times, the longest of some look-ups while the collector passes without a pause."""
        self.start(collect_interval_s=0.001)
        longest_ms = []
        with closing(EngineSidecarClient(self._address, timeout_s=60)) as client:
            for _ in range(times):
                times_ms = []
                for number in range(QUESTIONS):
                    began_s = time.perf_counter()
                    client.get_manifest(self._tenant(number), _ref(number), 10)
                    times_ms.append(_ms_since(began_s))
                longest_ms.append(max(times_ms))
        self._processes.end(self.name)
        return longest_ms

    def path(self, key: BlockKey) -> Path:
        """Return where a block file lies."""
        return self._data / f"{key.kind}s" / key.fan_out / key.file_name

    def manifest_path(self, manifest: Manifest) -> Path:
        """Return where a manifest lies."""
        return self._data / "manifests" / fan_out(manifest.cache_ref) / f"{manifest.cache_ref}.safetensors"

    def disk_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.stat().st_size for file in self._data.rglob("*.safetensors"))

    def _tenant(self, number: int) -> str:
        return f"tenant-{number % self._num_tenants}"

    async def _asked(self, call: Callable[[KVSidecarClient], Any]) -> Any:
        client = KVSidecarClient(self._address, timeout_s=60)
        answer = await call(client)
        await client.close()
        return answer

    def _served_at_s(self) -> float:
        lines = (self._processes.directory / f"{self.name}.log").read_text().splitlines()
        said = [json.loads(line) for line in lines if '"sidecar started"' in line]
        return datetime.fromisoformat(said[-1]["time"]).timestamp()


class Tokens(Bench):
    """Contexts of growing length in one sidecar."""

    def take(self, sizes: Sequence[int], number: int) -> Iterator[tuple[int, str, float]]:
        """Save one context of each number of tokens, load it, and load it once more after a restart; yield costs."""
        refs = {size: new_cache_ref() for size in sizes}
        for size, cache_ref in refs.items():
            before = self._files()
            sealed_s = self._rank.save(cache_ref, [(number << 8) + sizes.index(size), *range(1, size)])[SEALED]
            sizes_bytes = [file.stat().st_size for file in self._files() - before]
            manifest = next((self._data / "manifests").rglob(f"{cache_ref}.*"))
            yield size, SEALED, sealed_s * 1000
            yield size, "save / raw write", sealed_s / self._raw_write(sizes_bytes)
            yield size, "disk", (sum(sizes_bytes) + manifest.stat().st_size) / 2**20
        for source, tier in (("memory", "host"), ("disk", "disk")):
            for size, cache_ref in refs.items():
                began_s = time.perf_counter()
                self._client.get_manifest(TENANT, cache_ref, 10)
                if tier == "host":
                    yield size, "look-up", _ms_since(began_s)
                is_compared = (number, size) == (0, sizes[-1])
                yield size, f"load from {source}", self._load(cache_ref, tier, verify=is_compared) * 1000
            if tier == "host":
                self._restart()
        for cache_ref in refs.values():
            asyncio.run(self._delete(cache_ref))

    def _raw_write(self, sizes_bytes: Sequence[int]) -> float:
        """Write files of these sizes, each made durable, and remove them; return the seconds of the writing."""
        files = [self._data.parent / f"raw-{at}" for at in range(len(sizes_bytes))]
        began_s = time.perf_counter()
        for file, size_bytes in zip(files, sizes_bytes, strict=True):
            with file.open("wb", buffering=0) as target:
                target.write(self._source[:size_bytes].data)
                os.fsync(target.fileno())
        took_s = time.perf_counter() - began_s
        for file in files:
            file.unlink()
        return took_s


def _ref(number: int) -> str:
    # The first digits name the directory: spread, as those of random names are.
    return f"ref_{number % 256:02x}{number:030x}"


def _session(number: int) -> str:
    return f"ctx_{number:032x}"


def _write(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _ms_since(began_s: float) -> float:
    return (time.perf_counter() - began_s) * 1000
