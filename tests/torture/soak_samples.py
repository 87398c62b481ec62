"""What can leak, counted from outside every ten seconds: processes, Redis, disk and the sidecar's memory tier."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.kit.stack import Stack
from tests.torture.soak_slopes import Slope, slope_of

MIB = 1 << 20
IN_HAND = {
    "gateway": ("contextcache_gateway_ext_proc_streams", "contextcache_gateway_requests_in_flight"),
    "sidecar": ("contextcache_sidecar_contexts", "contextcache_sidecar_blocks"),
    "manager": ("contextcache_manager_sessions",),
}
"""What the parts say they have."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How fast a kind of series may grow in an hour, beyond chance: at least `absolute`, or this share of its level."""

    absolute: float
    share: float
    why: str

    def per_hour(self, slope: Slope) -> float:
        return max(self.absolute, self.share * slope.level)


BOUNDS = {
    "fds": Bound(12, 0, "two in ten minutes: caches of connections breathe"),
    "sockets": Bound(12, 0, "the same"),
    "threads": Bound(6, 0, "pools are full once warm"),
    "MiB": Bound(24, 0.04, "a KiB for each request would be 36 MiB; heaps of Python and malloc settle more slowly"),
    "keys": Bound(0, 0.15, "as many live contexts all the time; short-lived ones come and go"),
    "files": Bound(0, 0.3, "conversations of random lengths"),
    "count": Bound(6, 0.1, "in hand, and nothing stays"),
}
"""By unit. MiB of stores (disk, memory tier, Redis) have their level's share as `files` have."""
_STORES = ("disk", "memory tier", "redis store")


@dataclass
class Samples:
    """Series by (who, what, unit)."""

    times_s: list[float] = field(default_factory=list)
    series: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, stack: Stack, now_s: float, **more: float) -> None:
        """Count everything once; a part that does not answer keeps its last figures."""
        self.times_s.append(now_s)
        for who, pids in _processes(stack).items():
            for (what, unit), value in _of_processes(pids).items():
                self._add(who, what, unit, value)
        for counted in (_of_disk(stack), _of_memory_tier(stack), _of_redis(stack), _in_hand(stack)):
            for (who, what, unit), value in counted.items():
                self._add(who, what, unit, value)
        for what, value in more.items():
            self._add("load", what, "count", value)
        for values in self.series.values():
            values.extend(values[-1:] * (len(self.times_s) - len(values)))

    def rows(self) -> list[tuple[str, str, str, Slope, float, bool]]:
        """Return (who, what, unit, slope, bound an hour, whether it grows beyond that)."""
        rows = []
        for (who, what, unit), values in sorted(self.series.items()):
            if (who, what, unit) == ALL_KEYS:
                continue
            slope = slope_of(self.times_s[-len(values) :], values)
            bound = BOUNDS["files" if unit == "MiB" and who in _STORES else unit].per_hour(slope)
            rows.append((who, what, unit, slope, bound, slope.grows_beyond(bound)))
        return rows

    def _add(self, who: str, what: str, unit: str, value: float) -> None:
        values = self.series[who, what, unit]
        values.extend([value] * (len(self.times_s) - 1 - len(values)))
        values.append(value)


ALL_KEYS = ("redis store", "keys and tombstones", "keys")
"""Must be none in the end; meanwhile the faster a load deletes, the more tombstones there are."""


def _processes(stack: Stack) -> dict[str, list[int]]:
    found = {part: stack.pids(part) for part in stack.part_names}
    for engine in stack.engines:
        core = stack.engine_core_pids(engine)
        found[f"{engine} core"] = core
        found[engine] = [pid for pid in found[engine] if pid not in core]
    return found


def _of_processes(pids: Iterable[int]) -> dict[tuple[str, str], float]:
    totals = {
        ("open files", "fds"): 0.0,
        ("sockets", "sockets"): 0.0,
        ("threads", "threads"): 0.0,
        ("own memory", "MiB"): 0.0,
    }
    for pid in pids:
        with suppress(OSError):
            folder = Path(f"/proc/{pid}")
            links = [_link(path) for path in (folder / "fd").iterdir()]
            totals["open files", "fds"] += len(links)
            totals["sockets", "sockets"] += sum(link.startswith("socket:") for link in links)
            totals["threads", "threads"] += int(_number(folder / "status", "Threads:"))
            # Not the PSS: that of libraries grows when somebody else's processes end.
            own = ("Private_Clean:", "Private_Dirty:")
            totals["own memory", "MiB"] += sum(_number(folder / "smaps_rollup", name) for name in own) / 1024
    return totals


def _of_disk(stack: Stack) -> dict[tuple[str, str, str], float]:
    sizes = [_size(path) for path in stack.data().rglob("*")]
    return {
        ("disk", "files", "files"): float(sum(size is not None for size in sizes)),
        ("disk", "bytes", "MiB"): sum(size or 0 for size in sizes) / MIB,
    }


def _of_memory_tier(stack: Stack) -> dict[tuple[str, str, str], float]:
    """What the sidecar says is in it: the memory itself is there from the start."""
    with suppress(httpx.HTTPError):
        return {
            ("memory tier", "files", "files"): stack.counted("sidecar", "contextcache_sidecar_blocks", tier="host"),
            ("memory tier", "bytes", "MiB"): stack.counted("sidecar", "contextcache_sidecar_bytes", tier="host") / MIB,
        }
    return {}


def _of_redis(stack: Stack) -> dict[tuple[str, str, str], float]:
    import redis

    with suppress(redis.RedisError), redis.Redis(port=stack._plan.redis, socket_timeout=3) as client:
        memory, clients = client.info("memory"), client.info("clients")
        return {
            ("redis store", "keys", "keys"): float(_num_keys_but_tombstones(client)),
            ALL_KEYS: float(client.dbsize()),
            ("redis store", "used memory", "MiB"): memory["used_memory"] / MIB,
            ("redis store", "connections", "sockets"): float(clients["connected_clients"]),
        }
    return {}


def _num_keys_but_tombstones(client: Any) -> int:
    names = [
        name
        for name in client.scan_iter(count=1000)
        if not {b"place", b"usage", b"counted", b"bytes"} & set(name.split(b":"))
    ]
    pipeline = client.pipeline(transaction=False)
    for name in names:
        if b":session:" in name:
            pipeline.hget(name, "state")
    return len(names) - pipeline.execute().count(b"tombstone")


def _in_hand(stack: Stack) -> dict[tuple[str, str, str], float]:
    found = {}
    for part, names in IN_HAND.items():
        with suppress(httpx.HTTPError):
            samples = stack.metrics(part)
            for name in names:
                values = [value for (sample, _), value in samples.items() if sample == name and value == value]
                if values:
                    found[part, name, "count"] = sum(values)
    return found


def _number(path: Path, name: str) -> float:
    match = re.search(rf"^{name}\s+(\d+)", path.read_text(), re.MULTILINE)
    return float(match[1]) if match else 0.0


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
