"""How fast KV is saved and loaded, by tier, in GB/s, beside what the machine does with the same bytes.

The worker's half of the connector over paged tensors of its own and a real kv-sidecar process with the local stack's
settings, from the step's order to the result the engine sees. Not in it: the engine, the scheduler's question for the
manifest, a GPU. A save is timed until the engine may free its blocks, and until it is sealed, which waits for the disk.

Each round takes everything once, over a new context: memcpy, save, load from memory, memcpy; then, with memory emptied
by a restart, raw read and load from disk with the files in the page cache; then, after another restart, without them,
every other time the load first, so that neither always finds a disk that was just read. A restarted sidecar loads a
small context first: one that has run for a while has its threads and buffers.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.estimates import cell, interval, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from contextcache.errors import ContextCacheError
from contextcache.model import Manifest
from contextcache.names import new_cache_ref
from deploy.local.progress import say
from deploy.local.readiness import grpc_serves
from deploy.local.table import render
from kv_sidecar.client import TIER_NAMES, EngineSidecarClient, KVSidecarClient, open_arena, pack_token_ids
from vllm_plugin.connector.engine_check import LayerGroup
from vllm_plugin.connector.metadata import LoadPlan, SavePlan, load_pieces
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import MonotonicClock
from vllm_plugin.connector.worker_side import WorkerSide

TENANT = "demo"
WARM_TOKENS = 1024
"""Of the context that a restarted sidecar loads first."""
DEADLINE_FACTOR, DEADLINE_MS = 24, 120_000
MEASURED: Mapping[str, tuple[str, float | None]] = {
    "memcpy": ("memcpy", None),
    "raw read, warm": ("memcpy", None),
    "raw read, dropped": ("memcpy", None),
    "save, until released": ("memcpy", 0.65),
    "save, until sealed": ("memcpy", None),
    "load from memory": ("memcpy", 0.5),
    "load from disk, warm": ("raw read, warm", None),
    "load from disk, dropped": ("raw read, dropped", 0.7),
}
"""What it is compared with, and the least ratio."""
MEMCPY, RAW_WARM, RAW_DROPPED, RELEASED, SEALED, FROM_MEMORY, FROM_WARM, FROM_DROPPED = MEASURED


class Shape(NamedTuple):
    """A model's KV in bfloat16, in engine blocks of so many tokens."""

    layers: int
    heads: int
    head_dim: int
    block_tokens: int

    def size_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the engine blocks of so many tokens."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens * self.layers * self.heads * self.head_dim * 4


SHAPES = {"llama3-8b": Shape(32, 8, 128, 16), "smollm2": Shape(30, 3, 64, 32)}


def main() -> int:
    """Measure, print the tables, write the JSON; with --check, exit 1 when a bar is not met."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--tokens", type=int, default=4096, help="of the context; its bytes are needed six times")
    parser.add_argument("--rounds", type=int, default=9, help="after one that is compared byte by byte, not counted")
    options = parser.parse_args()
    load = os.getloadavg()
    samples = {name: _rounds(name, options.tokens, options.rounds) for name in options.shape or SHAPES}
    rows = [row for name, taken in samples.items() for row in _rows(name, options.tokens, taken)]
    head = ("shape", "what", "GB/s", "95 %", "ratio", "95 %", "of", "at least", "met")
    report = {"tokens": options.tokens, "load": [load, os.getloadavg()], "rows": rows}
    write_result(options.out, report)
    print(render(head, [[cell(value, ".2f") for value in row.values()] for row in rows]))
    if is_held := len(rows) < len(MEASURED) * len(samples):
        print("the page cache cannot be dropped here: posix_fadvise left the files in it")
    return 1 if options.check and (is_held or any(row["met"] == "no" for row in rows)) else 0


def _rounds(shape: str, num_tokens: int, num_rounds: int) -> list[dict[str, float]]:
    say(f"{shape} …")
    with (
        tempfile.TemporaryDirectory(prefix="bench-transfer-") as directory,
        Processes(Path(directory)) as processes,
        closing(Bench(processes, SHAPES[shape], num_tokens)) as bench,
    ):
        return [bench.measure(number) for number in range(num_rounds + 1)][1:]


class Rank:
    """One worker's half over random KV; a context is saved from one half of its blocks and loaded into the other."""

    def __init__(self, address: str, shape: Shape, num_tokens: int) -> None:
        of_context = -(-num_tokens // shape.block_tokens)
        num_blocks = 2 * (of_context + of_context // 8 + 2)
        words = ("model", "revision", "quantization", "dtype", "max_model_len")
        sizes = ("world_size", "tensor_parallel_size", "pipeline_parallel_size")
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(**dict.fromkeys(words), hf_config=SimpleNamespace(to_dict=dict)),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=shape.block_tokens),
            parallel_config=SimpleNamespace(rank=0, **dict.fromkeys(sizes, 1)),
            compilation_config=SimpleNamespace(static_forward_context={}),
            load_config=SimpleNamespace(load_format="dummy"),
            lora_config=None,
            speculative_config=None,
        )
        settings = ConnectorSettings(address, "none", deadline_factor=DEADLINE_FACTOR)
        pages = (num_blocks, shape.heads, shape.block_tokens, 2 * shape.head_dim)
        kv = {f"layer.{number}": torch.empty(pages, dtype=torch.bfloat16) for number in range(shape.layers)}
        groups, clock = [LayerGroup("full_attention", shape.block_tokens, 0, tuple(kv))], MonotonicClock()
        doors = (lambda s: EngineSidecarClient(address, timeout_s=s)), partial(open_arena, address)
        self.side = WorkerSide(config, num_blocks, groups, settings, *doors, clock=clock)
        self._words = [tensor.view(torch.int64).random_() for tensor in kv.values()]
        self.side.register_kv_caches(kv)
        self.facts: Any = self.side.facts
        # As an engine's free blocks: those of earlier requests, last first, here and there one that is in use.
        free = [number for number in range(num_blocks - 1, 0, -1) if number % 9]
        self.old, self.new = free[:of_context], free[of_context : 2 * of_context]

    def save(self, cache_ref: str, token_ids: Sequence[int]) -> dict[str, float]:
        """Save a context, and return the seconds until its blocks were let go and until it was sealed."""
        facts, num_saves = self.facts, self.side.counters.get("saves")
        now_ms, size = round(time.time() * 1000), facts.groups[0].num_positions(len(token_ids))
        names, times = (cache_ref, TENANT, "ctx_1", cache_ref), (now_ms + 3_600_000, now_ms)
        plan = SavePlan(
            *names, *times, 0, pack_token_ids(token_ids), facts.groups, (tuple(self.old[:size]),), facts.fingerprint
        )
        released_s, sealed_s = self._carried_out([], [plan], "sent", "ended_saves")
        if self.side.counters.get("saves") != num_saves + 1:
            raise RuntimeError("the save was skipped")
        return {RELEASED: released_s, SEALED: sealed_s}

    def load(self, manifest: Manifest, *, verify: bool) -> float:
        """Load a context and return the seconds it took. Raises RuntimeError when it failed, or brought other bytes."""
        for words in self._words if verify else ():
            words[self.new] = 0
        num_tokens, digests = len(manifest.token_ids), tuple(group.digest for group in self.facts.groups)
        names = ("load", "", manifest.tenant, manifest.cache_ref, manifest.fingerprint, digests)
        plan = LoadPlan(*names, load_pieces(manifest, self.facts, [self.new], 0, num_tokens), 0, num_tokens, 0.0)
        [taken_s] = self._carried_out([plan], [], "received")
        if verify and not all(torch.equal(words[self.new], words[self.old]) for words in self._words):
            raise RuntimeError("what was loaded is not what was saved")
        return taken_s

    def _carried_out(self, loads: Sequence[LoadPlan], saves: Sequence[SavePlan], *awaited: str) -> list[float]:
        seconds: dict[str, float] = {}
        began_s = time.perf_counter()
        self.side.start(loads, saves)
        while len(seconds) < len(awaited):
            results, now_s = self.side.take_results(), time.perf_counter() - began_s
            seconds = dict.fromkeys([name for name in awaited if getattr(results, name)], now_s) | seconds
            if results.failed or now_s > 2 * DEADLINE_MS / 1000:
                raise RuntimeError("a transfer failed, or does not end")
            time.sleep(0.0005)
        return [seconds[name] for name in awaited]


class Bench:
    """A sidecar, a rank, and the machine itself; measured in rounds."""

    def __init__(self, processes: Processes, shape: Shape, num_tokens: int) -> None:
        self._processes, self._num_tokens, self._data = processes, num_tokens, processes.directory / "data"
        self._address = f"unix://{processes.directory}/sidecar.sock"
        env = {"SIDECAR_UNIX_SOCKET": self._address.removeprefix("unix://"), "SIDECAR_LISTEN": ""}
        self._arena_bytes = 2 * shape.size_bytes(num_tokens + WARM_TOKENS)
        env |= {"SIDECAR_DATA_DIR": str(self._data), "SIDECAR_MEMORY_LIMIT_BYTES": str(self._arena_bytes)}
        processes.start("sidecar", (sys.executable, "-m", "kv_sidecar"), partial(grpc_serves, self._address), env=env)
        self._client = EngineSidecarClient(self._address)
        self._rank = Rank(self._address, shape, num_tokens)
        self._source, self._target = (np.ones(shape.size_bytes(num_tokens), dtype=np.uint8) for _ in range(2))
        self._warm_ref = new_cache_ref()
        self._rank.save(self._warm_ref, [1 << 20, *range(1, min(WARM_TOKENS, num_tokens))])
        self._warm_files = self._files()

    def close(self) -> None:
        """End the rank's threads and channels."""
        self._rank.side.shutdown()
        self._client.close()

    def measure(self, number: int) -> dict[str, float]:
        """Take everything once. Round 0 compares what was loaded with what was saved."""
        cache_ref, verify = new_cache_ref(), number == 0
        from_disk = partial(self._load, cache_ref, "disk", verify=verify)
        taken = {MEMCPY: self._memcpy() / 2} | self._rank.save(cache_ref, [number, *range(1, self._num_tokens)])
        files = sorted(self._files() - self._warm_files)
        taken[FROM_MEMORY] = self._load(cache_ref, "host", verify=verify)
        taken[MEMCPY] += self._memcpy() / 2
        self._restart()
        self._raw_read(files)
        taken[RAW_WARM] = self._raw_read(files)
        taken[FROM_WARM] = from_disk()
        self._restart()
        steps = [(RAW_DROPPED, partial(self._raw_read, files)), (FROM_DROPPED, from_disk)]
        for what, step in steps if number % 2 else reversed(steps):
            taken |= {what: step()} if _dropped(files) else {}
        asyncio.run(self._delete(cache_ref))
        return taken

    def _load(self, cache_ref: str, tier: str, *, verify: bool = False) -> float:
        manifest, found = self._client.get_manifest(TENANT, cache_ref, 10)
        if TIER_NAMES[found] != tier:
            raise RuntimeError(f"the context is not in the tier that is measured: {tier}")
        return self._rank.load(manifest, verify=verify)

    def _restart(self) -> None:
        """Empty the memory tier: start the sidecar anew, and let the rank find it."""
        os.kill(self._processes.pid("sidecar"), signal.SIGKILL)
        self._processes.restart("sidecar")
        for _ in range(100):
            with suppress(ContextCacheError, RuntimeError):
                self._load(self._warm_ref, "disk")
                return self._wait_for_arena()
            time.sleep(0.2)
        raise RuntimeError("the rank does not find the sidecar again")

    def _wait_for_arena(self) -> None:
        """Wait until memory is behind all of it, here and there: it is taken while the first loads run."""
        for pid in (os.getpid(), self._processes.pid("sidecar")):
            status = Path(f"/proc/{pid}/status")
            while int(status.read_text().partition("RssShmem:")[2].split()[0]) << 10 < self._arena_bytes:
                time.sleep(0.05)

    async def _delete(self, cache_ref: str) -> None:
        client = KVSidecarClient(self._address, timeout_s=DEADLINE_MS / 1000)
        await client.delete_context(TENANT, cache_refs=[cache_ref])
        await client.close()

    def _files(self) -> set[Path]:
        return {path for name in ("blocks", "tails") for path in (self._data / name).rglob("*") if path.is_file()}

    def _memcpy(self) -> float:
        began_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - began_s

    def _raw_read(self, files: Sequence[Path]) -> float:
        """Read whole files, one after the other, to where memcpy copies to as well."""
        target, at, began_s = memoryview(self._target.data), 0, time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as source:
                while count := os.readv(source.fileno(), [target[at:]]):
                    at = (at + count) % len(target)  # the heads of the files begin it anew
        return time.perf_counter() - began_s


def _dropped(files: Sequence[Path]) -> bool:
    """Drop files from the page cache; return whether that works here (not on tmpfs)."""
    num_held = 0
    for file in files:
        with file.open("rb") as source, mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            os.fsync(source.fileno())
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            held = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
            start, size = np.frombuffer(mapped, dtype=np.uint8).ctypes.data, ctypes.c_size_t(len(mapped))
            num_held += ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, held.ctypes) or int((held & 1).sum())
    return num_held == 0


def _rows(shape: str, num_tokens: int, samples: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Return what the table shows; what could not be measured has no row."""
    rows, size_bytes = [], SHAPES[shape].size_bytes(num_tokens)
    for what, (of, bar) in MEASURED.items():
        if all(what in taken for taken in samples):
            row: dict[str, Any] = {"shape": shape, "what": what}
            rates = [size_bytes / taken[what] / 1e9 for taken in samples]
            row |= {"gb_s": percentile(rates, digits=4), "gb_s_95": interval(rates, digits=4)}
            ratios = [taken[of] / taken[what] for taken in samples]
            row |= {"ratio": percentile(ratios, digits=4), "ratio_95": interval(ratios, digits=4)}
            met = "-" if bar is None else "yes" if row["ratio"] >= bar else "no"
            rows.append(row | {"of": of, "bar": bar, "met": met})
    return rows


if __name__ == "__main__":
    sys.exit(main())
