"""The path of one block: files and functions of the product that a block passes when it is saved and loaded.

A worker's half of the connector and a whole kv-sidecar run in this process, with real gRPC and a real arena.
A profiler in every thread counts Python calls; in no step is time measured.

Each of three contexts is saved, loaded from memory, and loaded from disk after the sidecar has started anew. The
first one warms caches. The second has one block, the third `--blocks`. Their difference gives calls per further block.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.bench_transfer import TENANT, Rank, Shape
from benchmarks.result import parser_of, write_result
from contextcache.errors import ContextCacheError
from contextcache.names import new_cache_ref
from deploy.local.readiness import grpc_serves
from deploy.local.table import render
from kv_sidecar.__main__ import run
from kv_sidecar.client import EngineSidecarClient
from kv_sidecar.settings import SidecarSettings

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kv_sidecar/", "vllm_plugin/", "contextcache/", "integrations/")
GENERATED = "contextcache/v1/"
SHAPE = Shape(layers=4, heads=2, head_dim=16, block_tokens=16)
BLOCK_TOKENS = 256
FILES_MAX = {"saved": 14, "loaded": 12}
"""Files of `kv_sidecar` and `vllm_plugin` that a block may pass."""
CALLS_MAX = 100
"""Python calls that a further block may cost, in all code."""


@dataclass
class Profile:
    """Calls of Python functions in all threads that start after `install`.

    The thread that installs it plays the engine. It polls for results, so its calls are not counted, its files are.
    """

    calls: Counter[CodeType] = field(default_factory=Counter)
    _of_engine: set[CodeType] = field(default_factory=set)
    _counts: bool = False

    def install(self) -> None:
        """Profile this thread and those that start from now on."""
        threading.setprofile(self._entered)
        sys.setprofile(self._entered_by_engine)

    def remove(self) -> None:
        """Profile nothing more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _entered(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and self._counts:
            self.calls[frame.f_code] += 1

    def _entered_by_engine(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and self._counts:
            self._of_engine.add(frame.f_code)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of the block that runs under it, from zero."""
        self.calls, self._of_engine = Counter(), set()
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def walk(self) -> Walk:
        """Return the functions of the product that were called, and the number of all calls."""
        named = [(_path(code), code.co_qualname) for code in {*self.calls, *self._of_engine}]
        functions = {(path, name) for path, name in named if path and not name.startswith("<")}
        return Walk(frozenset(functions), sum(self.calls.values()))


@dataclass(frozen=True)
class Walk:
    """Functions that were entered, with their files."""

    functions: frozenset[tuple[str, str]]
    num_calls: int

    @property
    def files(self) -> list[str]:
        """Files of the sidecar and the plugin, sorted."""
        return sorted({path for path, _ in self.functions if not path.startswith("contextcache/")})

    @property
    def shared_files(self) -> list[str]:
        """Files of the package that all parts share."""
        return sorted({path for path, _ in self.functions if path.startswith("contextcache/")})


def _path(code: CodeType) -> str:
    """Return a product file's path below the root; empty for other code."""
    file = Path(code.co_filename)
    path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""
    return path if path.startswith(PACKAGES) and not path.startswith(GENERATED) else ""


class RunningSidecar:
    """A sidecar in a thread of this process."""

    def __init__(self, directory: Path) -> None:
        socket = directory / "sidecar.sock"
        self.address = f"unix://{socket}"
        self._settings = SidecarSettings(
            unix_socket=socket, listen="", data_dir=directory / "data", memory_limit_bytes=256 << 20
        )
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sidecar")
        self._thread.start()
        while not grpc_serves(self.address):
            threading.Event().wait(0.05)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(run(self._settings, self._stop))
        self._loop.close()

    def stop(self) -> None:
        """End the sidecar as SIGTERM does."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def walks(num_blocks: int) -> dict[str, tuple[Walk, Walk]]:
    """Return the walk of one block and of `num_blocks`, by direction and tier."""
    profile = Profile()
    with tempfile.TemporaryDirectory(prefix="block-path-") as name:
        profile.install()
        try:
            return _walks(profile, Path(name), num_blocks)
        finally:
            profile.remove()


def _walks(profile: Profile, directory: Path, num_blocks: int) -> dict[str, tuple[Walk, Walk]]:
    sizes = (2, 1, num_blocks)
    contexts = {size: (new_cache_ref(), [size, *range(1, size * BLOCK_TOKENS)]) for size in sizes}
    found: dict[tuple[str, int], Walk] = {}

    def take(direction: str, size: int, act: Any) -> None:
        with profile.counting():
            act()
        found[direction, size] = profile.walk()

    sidecar = RunningSidecar(directory)
    client, rank = EngineSidecarClient(sidecar.address), Rank(sidecar.address, SHAPE, num_blocks * BLOCK_TOKENS)
    try:
        for size, (cache_ref, token_ids) in contexts.items():
            take("saved", size, lambda ref=cache_ref, ids=token_ids: rank.save(ref, ids))
        for tier in ("memory", "disk"):
            if tier == "disk":
                sidecar.stop()
                sidecar = RunningSidecar(directory)
            for size, (cache_ref, _) in contexts.items():
                manifest, _ = _until(lambda ref=cache_ref: client.get_manifest(TENANT, ref, 10))
                act = partial(_until, partial(rank.load, manifest, verify=False))
                take(f"loaded, {tier}", size, act)
    finally:
        rank.side.shutdown()
        client.close()
        sidecar.stop()
    names = ("saved", "loaded, memory", "loaded, disk")
    return {name: (found[name, 1], found[name, num_blocks]) for name in names}


def _until(act: Any) -> Any:
    """Return the result, after retries: a rank takes a moment to find a sidecar that has restarted."""
    for _ in range(100):
        with suppress(ContextCacheError, RuntimeError):
            return act()
        threading.Event().wait(0.05)
    return act()


def main() -> int:
    """Print the table and the files; exit 1 with `--check` when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--blocks", type=int, default=33, help="blocks of the longest context")
    parser.add_argument("--files", action="store_true", help="list files and functions too")
    options = parser.parse_args()
    rows, is_missed = [], False
    for name, (one, many) in walks(options.blocks).items():
        files_max = FILES_MAX[name.partition(",")[0]]
        calls = (many.num_calls - one.num_calls) / (options.blocks - 1)
        is_missed |= len(one.files) > files_max or calls > CALLS_MAX
        row = {"way": name, "files": len(one.files), "files_max": files_max, "shared_files": len(one.shared_files)}
        rows.append(row | {"functions": len(one.functions), "calls_per_block": round(calls, 1)})
        if options.files:
            for path in [*one.files, *one.shared_files]:
                functions = sorted(function for file, function in one.functions if file == path)
                print(f"{name}: {path}: {', '.join(functions)}")
    write_result(options.out, {"blocks": options.blocks, "rows": rows})
    print(render(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    return 1 if options.check and is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
