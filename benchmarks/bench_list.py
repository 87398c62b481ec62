"""What one `GET /v1/context` costs the manager, over 100 000 sessions of one tenant.

A real Valkey, the manager's own store over it, in this process. Each call is made some times; shown are the manager's
processor time and the whole time, as medians. `--before FILE` puts the report of another version beside this one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from benchmarks.processes import Processes
from benchmarks.result import RESULTS, write_result
from context_manager.layout import expiry_key, member, session_key, tenant_key
from context_manager.limits import SessionKey
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.redis_connection import RedisConnection
from context_manager.row import stored_fields
from contextcache.errors import StoreUnavailable
from contextcache.model import NewSession
from contextcache.names import shard_of
from deploy.local.progress import say
from deploy.local.table import render

TENANT = "demo"
BAR_MS = 50.0
CALLS: Mapping[str, dict[str, Any]] = {
    "20, any model": {"limit": 20, "model_id": ""},
    "100, any model": {"limit": 100, "model_id": ""},
    "20, a model of 1 in 10": {"limit": 20, "model_id": "tenth"},
    "20, a model of 1 in 10 000": {"limit": 20, "model_id": "rare"},
    "20, a model nobody has": {"limit": 20, "model_id": "none"},
}


def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a call is over the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="a report of another version")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_list.json", help="where the JSON goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-list-") as directory, Processes(Path(directory)) as processes:
        processes.start_valkey()
        now_ms = round(time.time() * 1000)
        _fill(processes.port("valkey"), options.sessions, now_ms)
        rows = asyncio.run(_measured(f"redis://{processes.address('valkey')}/0", options.repeats))
    before = {row["call"]: row for row in json.loads(options.before.read_text())["rows"]} if options.before else {}
    for row in rows:
        row["before"] = {key: before[row["call"]][key] for key in ("cpu_ms", "wall_ms")} if before else None
    report = {"sessions": options.sessions, "bar_ms": BAR_MS, "rows": rows}
    write_result(options.out, report)
    print(_table(rows))
    return 0 if all(row["met"] for row in rows) else 1


def _fill(port: int, num_sessions: int, now_ms: int) -> None:
    say(f"{num_sessions} sessions …")
    with redis.Redis(port=port) as raw:
        for start in range(0, num_sessions, 5000):
            with raw.pipeline(transaction=False) as pipeline:
                for number in range(start, min(start + 5000, num_sessions)):
                    _add(pipeline, number, now_ms - num_sessions + number)
                pipeline.execute()


def _add(pipeline: Any, number: int, created_at_ms: int) -> None:
    model = "rare" if number % 10_000 == 7 else "tenth" if number % 10 == 3 else "usual"
    new = NewSession(TENANT, f"ctx_{number:032x}", model, ttl_s=86_400, metadata={"customer": "a" * 32})
    expires_at_ms = created_at_ms + new.ttl_s * 1000
    fields = stored_fields(new) | {"state": "ready", "generation": 1, "holder": "pod-1", "holders": "pod-1"}
    fields |= {"created_at_ms": created_at_ms, "expires_at_ms": expires_at_ms}
    key = SessionKey(TENANT, new.session_id)
    shard = shard_of(TENANT, new.session_id)
    pipeline.hset(session_key(key), mapping=fields)
    pipeline.zadd(expiry_key(shard), {member(key): expires_at_ms})
    pipeline.zadd(tenant_key(shard, TENANT), {new.session_id: created_at_ms})


async def _measured(url: str, repeats: int) -> list[dict[str, Any]]:
    connection = RedisConnection(url, timeout_s=120.0, max_connections=8)
    manager = ContextCacheManager(connection, metrics=ManagerMetrics(CollectorRegistry()))
    rows = []
    for call, page in CALLS.items():
        taken = [await _timed(manager, page) for _ in range(repeats + 1)][1:]
        cpu_ms, wall_ms = (round(statistics.median(times), 1) for times in zip(*taken, strict=True))
        rows.append({"call": call, "cpu_ms": cpu_ms, "wall_ms": wall_ms, "met": cpu_ms <= BAR_MS})
    await connection.close()
    return rows


async def _timed(manager: ContextCacheManager, page: Mapping[str, Any]) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    try:
        await manager.list_sessions(TENANT, **page)
    except StoreUnavailable:
        say("no answer in time")
    return (time.process_time() - cpu_s) * 1000, (time.perf_counter() - wall_s) * 1000


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["a page of", "manager ms", "whole ms", "before: manager ms", "whole ms", f"at most {BAR_MS:.0f} ms"]
    cells = []
    for row in rows:
        before = row["before"] or {"cpu_ms": "", "wall_ms": ""}
        verdict = "pass" if row["met"] else "FAIL"
        cells.append([row["call"], *map(str, (row["cpu_ms"], row["wall_ms"], *before.values())), verdict])
    return render(heads, cells)


if __name__ == "__main__":
    sys.exit(main())
