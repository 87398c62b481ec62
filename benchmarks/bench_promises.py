"""Promises of lifetime under overload: how many are broken, how fast one is denied, what they cost other tenants.

A real kv-sidecar process over gRPC. Twenty tenants ask for 10 000 promises on contexts of three times the disk's limit:
half of them with the save, half once the KV is sealed. Another tenant saves contexts and loads recent ones all the
time, without promises. Each round has two halves, in changing order: the twenty tenants ask for promises, or save a
quarter as many contexts, with as many calls for each, without. In each half the sidecar is killed with SIGKILL and
started again.

After each start and at the end, every promise that was accepted and is not over is loaded and compared byte by byte.
A promise counts as accepted once its answer has come. Denials are timed at the caller. The other tenant's rate is
compared between the halves of a round; the time in which no sidecar runs does not count.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.estimates import cell, interval, paired_row, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from contextcache.model import Manifest
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2_grpc as pb_grpc
from contextcache.wire.messages import value_of
from deploy.local.readiness import grpc_serves
from deploy.local.table import render
from kv_sidecar.client import BlockFileWriter, file_meta, pack_token_ids, with_files

BLOCK_TOKENS, BLOCKS, PAGES_BYTES = 4, 2, 7 << 10
FINGERPRINT = "f" * 64
TENANTS, OTHER = [f"tenant-{number}" for number in range(20)], "other"
THREADS = 2
SHORT_MS, LONG_MS = (5_000, 20_000), 3_600_000
TIMEOUT_S = 20.0
DENIAL_MS_MAX, THROUGHPUT_MIN, OVERLOAD = 5.0, 0.95, 3
ALONE = 2000
"""Denials that are timed without other load."""
RECENT = 4
"""Saves of the other tenant between a context and its load."""
_DIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
}
"""Answers when the sidecar dies in a call, or between two calls of a save."""
_HEADS = ("what", "n", "figure", "95 %", "bar", "met")


@dataclass(frozen=True, slots=True)
class Context:
    """One context of known bytes."""

    tenant: str
    session_id: str
    cache_ref: str
    seed: int
    until_ms: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that no other context has."""
        first = self.seed * BLOCK_TOKENS * BLOCKS
        return tuple(range(first, first + BLOCK_TOKENS * BLOCKS))

    def file(self, manifest: Manifest, index: int) -> bytes:
        """Return the bytes of one block file."""
        file = manifest.files[index]
        meta = file_meta(
            file,
            group="",
            tenant=self.tenant,
            fingerprint=FINGERPRINT,
            rank=0,
            token_ids=self.token_ids[file.first_token : file.end_token],
        )
        writer = BlockFileWriter(meta, pages_bytes=PAGES_BYTES)
        writer.begin(memoryview(bytearray(writer.size_bytes)))
        writer.pages[:] = np.random.default_rng((self.seed, index)).integers(0, 256, PAGES_BYTES, np.uint8)
        return bytes(writer.finish())


class Sidecar:
    """The process, killed and started again, and calls of it that a dead process does not fail for good."""

    def __init__(self, processes: Processes, disk_bytes: int) -> None:
        self._processes = processes
        self.address = f"unix://{processes.directory}/sidecar.sock"
        env = {
            "SIDECAR_UNIX_SOCKET": self.address.removeprefix("unix://"),
            "SIDECAR_LISTEN": "",
            "SIDECAR_DATA_DIR": str(processes.directory / "data"),
            "SIDECAR_MEMORY_LIMIT_BYTES": str(disk_bytes // 8),
            "SIDECAR_DISK_LIMIT_BYTES": str(disk_bytes),
            "SIDECAR_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "SIDECAR_LOG_LEVEL": "ERROR",
        }
        processes.start("sidecar", (sys.executable, "-m", "kv_sidecar"), partial(grpc_serves, self.address), env=env)
        self.is_up = threading.Event()
        self.is_up.set()

    def kill(self) -> None:
        """End the process at once, and start it over the same directory."""
        self.is_up.clear()
        os.kill(self._processes.pid("sidecar"), signal.SIGKILL)
        self._processes.restart("sidecar")
        self.is_up.set()


class Client:
    """Calls of one thread."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._channel = grpc.insecure_channel(sidecar.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = pb_grpc.KVSidecarServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def save(self, context: Context, *, retain_ms: int = 0) -> pb.WaitSealedResponse:
        """Save a context and wait for its seal."""
        now_ms = time.time_ns() // 1_000_000
        request = pb.PrepareSaveRequest(
            tenant=context.tenant,
            session_id=context.session_id,
            cache_ref=context.cache_ref,
            fingerprint=FINGERPRINT,
            world_size=1,
            token_ids=pack_token_ids(context.token_ids),
            expires_at_ms=now_ms + 2 * LONG_MS,
            started_at_ms=now_ms,
            retain_ms=retain_ms,
        )
        prepared = self.stub.PrepareSave(request, timeout=TIMEOUT_S)
        self.stub.SaveBlocks(self._frames(context, list(prepared.missing_files)), timeout=TIMEOUT_S)
        self.stub.Seal(pb.SealRequest(cache_ref=context.cache_ref), timeout=TIMEOUT_S)
        return self.stub.WaitSealed(
            pb.WaitSealedRequest(tenant=context.tenant, cache_ref=context.cache_ref, timeout_ms=5000), timeout=TIMEOUT_S
        )

    def _frames(self, context: Context, indices: list[int]) -> Iterator[pb.SaveBlocksRequest]:
        manifest = _plan(context)
        for index in indices:
            data = context.file(manifest, index)
            yield pb.SaveBlocksRequest(cache_ref=context.cache_ref, block_index=index, frame=data, last_frame=True)

    def is_whole(self, context: Context) -> bool:
        """Return whether a context can be loaded and has the bytes that were saved."""
        try:
            request = pb.GetManifestRequest(tenant=context.tenant, cache_ref=context.cache_ref)
            found = self.stub.GetManifest(request, timeout=TIMEOUT_S).manifest
            manifest = with_files(value_of(Manifest, found))
            loading = pb.LoadBlocksRequest(
                tenant=context.tenant, cache_ref=context.cache_ref, fingerprint=FINGERPRINT, block_indices=range(BLOCKS)
            )
            files: dict[int, bytes] = {}
            for answer in self.stub.LoadBlocks(loading, timeout=TIMEOUT_S):
                files[answer.block_index] = files.get(answer.block_index, b"") + answer.frame
        except grpc.RpcError as exc:
            if exc.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise
        return all(files.get(index) == context.file(manifest, index) for index in range(BLOCKS))


def _plan(context: Context) -> Manifest:
    """Return the manifest to be."""
    found = pb.Manifest(
        cache_ref=context.cache_ref,
        tenant=context.tenant,
        session_id=context.session_id,
        fingerprint=FINGERPRINT,
        token_ids=context.token_ids,
        world_size=1,
        groups=[
            pb.KVGroup(
                kind="full_attention",
                block_tokens=BLOCK_TOKENS,
                runs=[pb.TokenRun(first_token=0, end_token=len(context.token_ids))],
            )
        ],
    )
    return with_files(value_of(Manifest, found))


@dataclass
class Bench:
    """The sidecar, its load, and what was promised."""

    sidecar: Sidecar
    random: random.Random
    accepted: list[Context] = field(default_factory=list)
    denied_ms: list[float] = field(default_factory=list)
    """Of the calls that ask for sealed KV."""
    alone_ms: list[float] = field(default_factory=list)
    """Of the same calls without other load."""
    empty_ms: list[float] = field(default_factory=list)
    """Of calls that decide nothing, in the halves without promises: the machine's own part."""
    outcomes: dict[str, int] = field(default_factory=dict)
    num_broken: int = 0
    num_deleted: int = 0
    num_checked: int = 0
    other_ops: int = 0
    other_misses: int = 0
    _seed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def new_context(self, tenant: str) -> Context:
        """Return a context of its own session."""
        with self._lock:
            self._seed += 1
            return Context(tenant, f"ctx_{self._seed}", new_cache_ref(), self._seed)

    def half(self, number: int, *, promises: bool, kills: bool) -> float:
        """Have the tenants make requests; return the other tenant's operations a second while a sidecar ran."""
        left = iter(range(number))
        began_s, before, down_s = time.perf_counter(), self.other_ops, 0.0
        threads = [threading.Thread(target=self._ask, args=(left, promises)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        if kills:
            time.sleep(self.random.uniform(0.5, 2.5))
            killed_s = time.perf_counter()
            self.sidecar.kill()
            down_s = time.perf_counter() - killed_s
        for thread in threads:
            thread.join()
        rate = (self.other_ops - before) / (time.perf_counter() - began_s - down_s)
        self.check()
        return rate

    def _ask(self, left: Iterator[int], promises: bool) -> None:  # noqa: FBT001  # a thread's argument
        with closing(Client(self.sidecar)) as client:
            while True:
                with self._lock:
                    number = next(left, None)
                if number is None:
                    return
                while not self._asked(client, number, promises=promises):
                    self.sidecar.is_up.wait()

    def _asked(self, client: Client, number: int, *, promises: bool) -> bool:
        """Make one request; False: the sidecar died in it, and nothing is known of it."""
        context = self.new_context(self.random.choice(TENANTS))
        retain_ms = self.random.randint(*SHORT_MS) if self.random.random() < 0.3 else LONG_MS
        with_save = number % 2 == 0
        try:
            saved = client.save(context, retain_ms=retain_ms if promises and with_save else 0)
            promise, began_s = saved.promise, time.perf_counter()
            if not promises:
                if not with_save:
                    client.stub.GetTenantUsage(pb.GetTenantUsageRequest(tenant=context.tenant), timeout=TIMEOUT_S)
                    self.empty_ms.append((time.perf_counter() - began_s) * 1000)
                return True
            if not with_save:
                request = pb.RetainContextRequest(
                    tenant=context.tenant, cache_refs=[context.cache_ref], retain_ms=retain_ms
                )
                promise = client.stub.RetainContext(request, timeout=TIMEOUT_S).promise
            took_ms = (time.perf_counter() - began_s) * 1000
        except grpc.RpcError as exc:
            if exc.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND}:
                return False
            if exc.code() in {
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.ABORTED,
            }:  # it died between two calls
                return False
            raise
        with self._lock:
            outcome = promise.reason or "accepted"
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            if promise.until_ms:
                self.accepted.append(
                    Context(context.tenant, context.session_id, context.cache_ref, context.seed, promise.until_ms)
                )
            elif not with_save:
                self.denied_ms.append(took_ms)
        return True

    def check(self) -> None:
        """Load every accepted promise that is not over, and count those that are broken."""
        with closing(Client(self.sidecar)) as client:
            for context in self.accepted:
                if time.time_ns() // 1_000_000 >= context.until_ms:
                    continue
                is_whole = client.is_whole(context)
                self.num_checked += 1
                self.num_broken += not is_whole and time.time_ns() // 1_000_000 < context.until_ms
        now_ms = time.time_ns() // 1_000_000
        self.accepted = [context for context in self.accepted if now_ms < context.until_ms]

    def delete_some(self, share: float) -> int:
        """Delete some promised contexts; return how many were still there afterwards."""
        chosen = [context for context in self.accepted if self.random.random() < share]
        with closing(Client(self.sidecar)) as client:
            for context in chosen:
                request = pb.DeleteContextRequest(tenant=context.tenant, session_id=context.session_id)
                client.stub.DeleteContext(request, timeout=TIMEOUT_S)
            left = sum(client.is_whole(context) for context in chosen)
        self.num_deleted += len(chosen)
        gone = {context.cache_ref for context in chosen}
        self.accepted = [context for context in self.accepted if context.cache_ref not in gone]
        return left

    def load_others(self) -> None:
        """Save and load contexts of the other tenant until `end`."""
        recent: list[Context] = []
        with closing(Client(self.sidecar)) as client:
            while not self._ended.is_set():
                context = self.new_context(OTHER)
                try:
                    client.save(context)
                    recent.append(context)
                    if len(recent) > RECENT:
                        self.other_misses += not client.is_whole(recent.pop(0))
                    self.other_ops += 1
                except grpc.RpcError:
                    recent.clear()
                    self.sidecar.is_up.wait()

    def ask_alone(self, number: int) -> None:
        """Time denials while no other call runs."""
        with closing(Client(self.sidecar)) as client:
            context = None
            while len(self.alone_ms) < number:
                if context is None or not self.alone_ms:  # the first contexts use up the tenant's share
                    context = self.new_context(TENANTS[0])
                    client.save(context)
                request = pb.RetainContextRequest(
                    tenant=context.tenant, cache_refs=[context.cache_ref], retain_ms=LONG_MS
                )
                began_s = time.perf_counter()
                if client.stub.RetainContext(request, timeout=TIMEOUT_S).promise.reason:
                    self.alone_ms.append((time.perf_counter() - began_s) * 1000)

    def end(self) -> None:
        """Have the other tenant end."""
        self._ended.set()


def main() -> int:
    """Measure, print the table, write the JSON; with --check, exit 1 when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--promises", type=int, default=10_000, help="asked for in all rounds")
    parser.add_argument("--rounds", type=int, default=10, help="of two halves")
    parser.add_argument("--seed", type=int, default=1, help="of tenants, lifetimes and kills")
    options = parser.parse_args()
    load, size = os.getloadavg(), BLOCKS * len(Context("t", "s", new_cache_ref(), 1).file(_plan(_ANY), 0))
    disk_bytes = options.promises * size // OVERLOAD
    with_s, without_s, num_left = [], [], 0
    with tempfile.TemporaryDirectory(prefix="bench-promises-") as directory, Processes(Path(directory)) as processes:
        bench = Bench(Sidecar(processes, disk_bytes), random.Random(options.seed))
        other = threading.Thread(target=bench.load_others)
        other.start()
        try:
            for number in range(options.rounds):
                for promises in (True, False) if number % 2 else (False, True):
                    number_asked = options.promises // options.rounds // (1 if promises else 4)
                    rate = bench.half(number_asked, promises=promises, kills=True)
                    (with_s if promises else without_s).append(rate)
                num_left += bench.delete_some(0.02)
                print(f"round {number + 1}: {bench.outcomes}, {bench.num_broken} broken", flush=True)
        finally:
            bench.end()
            other.join()
        bench.check()
        bench.ask_alone(ALONE)
    rows = _rows(bench, with_s, without_s, num_left)
    print(render(_HEADS, [[cell(row[key], ".3f") for key in row] for row in rows]))
    report = {
        "promises": options.promises,
        "asked_bytes": options.promises * size,
        "disk_limit_bytes": disk_bytes,
        "kills": 2 * options.rounds,
        "outcomes": bench.outcomes,
        "other_misses": bench.other_misses,
        "load": [load, os.getloadavg()],
        "rows": rows,
    }
    write_result(options.out, report)
    return 1 if options.check and any(row["met"] is False for row in rows) else 0


def _rows(bench: Bench, with_s: list[float], without_s: list[float], num_left: int) -> list[dict[str, Any]]:
    def row(what: str, n: int, figure: float | None, bar: float, *, at_least: bool = False) -> dict[str, Any]:
        met = figure is not None and (figure >= bar if at_least else figure <= bar)
        return {"what": what, "n": n, "figure": figure, "95": None, "bar": bar, "met": met}

    alone = bench.alone_ms
    denied, empty, ratio = bench.denied_ms, bench.empty_ms, paired_row(with_s, without_s, None)
    return [
        row("promises broken", bench.num_checked, bench.num_broken, 0),
        row("promised contexts left after their delete", bench.num_deleted, num_left, 0),
        row("denial without other load, ms, 99 %", len(alone), percentile(alone, 99, digits=3), DENIAL_MS_MAX)
        | {"95": interval(alone, 99, digits=3)},
        row("denial, ms, median", len(denied), percentile(denied, digits=3), DENIAL_MS_MAX)
        | {"95": interval(denied, digits=3)},
        row("denial, ms, 99 %", len(denied), percentile(denied, 99, digits=3), DENIAL_MS_MAX)
        | {"95": interval(denied, 99, digits=3)},
        _beside("a call that decides nothing, ms, median", empty, 50),
        _beside("a call that decides nothing, ms, 99 %", empty, 99),
        row("other tenant's rate with promises, to without", len(with_s), ratio["ratio"], THROUGHPUT_MIN, at_least=True)
        | {"95": ratio["ratio_95"]},
    ]


def _beside(what: str, values: list[float], q: float) -> dict[str, Any]:
    """Return a row without a bar."""
    found = {"figure": percentile(values, q, digits=3), "95": interval(values, q, digits=3)}
    return {"what": what, "n": len(values), **found, "bar": None, "met": None}


_ANY = Context("t", "s", new_cache_ref(), 1)


if __name__ == "__main__":
    sys.exit(main())
