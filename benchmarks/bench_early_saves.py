"""What early saves of a long prompt cost beside the copies: token ids that travel, CPU time of worker and sidecar.

The worker's half of the connector and a real kv-sidecar process. A prompt of 131 072 tokens is computed 2 048 tokens a
step, and each step sends its whole blocks ahead. The sidecar has all blocks of it, from a context that was saved
before, so that what is left is the tokens: their way, their hashes, and the state of the save. Of the worker count the
engine's thread inside the connector, and all threads of the connector.

Each round is a save of its own. The bars are those of the data path: ids 1.05 times, 30 ms each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.bench_transfer import TENANT, Rank, Shape
from benchmarks.estimates import cell, interval, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from contextcache.identity import KVTransfer
from contextcache.names import new_cache_ref
from deploy.local.readiness import grpc_serves
from deploy.local.table import render
from kv_sidecar.client import EngineSidecarClient
from vllm_plugin.connector.metadata import SavePlan
from vllm_plugin.connector.saves.running import RunningSaves

SHAPE = Shape(layers=1, heads=1, head_dim=8, block_tokens=16)
NUM_TOKENS, STEP_TOKENS = 131_072, 2_048
IDS_MAX, CPU_MS_MAX = 1.05, 30.0
TOKEN_BYTES = 4
_HEADS = ("what", "n", "median", "95 %", "at most", "met")


def main() -> int:
    """Measure, print the table, write the JSON; with --check, exit 1 when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=9, help="after one that is not counted")
    options = parser.parse_args()
    load = os.getloadavg()
    with (
        tempfile.TemporaryDirectory(prefix="bench-early-saves-") as directory,
        Processes(Path(directory)) as processes,
        closing(Bench(processes, options.tokens)) as bench,
    ):
        samples = [bench.measure() for _ in range(options.rounds + 1)][1:]
    rows = []
    for what, at_most in (("ids sent", IDS_MAX), ("worker, CPU ms", CPU_MS_MAX), ("sidecar, CPU ms", CPU_MS_MAX)):
        values = [sample[what] for sample in samples]
        row: dict[str, Any] = {"what": what, "n": len(values), "median": percentile(values, digits=3)}
        rows.append(row | {"95": interval(values, digits=3), "at_most": at_most, "met": row["median"] <= at_most})
    print(render(_HEADS, [[cell(value, ".2f") for value in row.values()] for row in rows]))
    write_result(options.out, {"tokens": options.tokens, "load": [load, os.getloadavg()], "rows": rows})
    return 1 if options.check and not all(row["met"] for row in rows) else 0


class Bench:
    """A sidecar that has every block of the prompt, and a rank."""

    def __init__(self, processes: Processes, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        address = f"unix://{processes.directory}/sidecar.sock"
        env = {"SIDECAR_UNIX_SOCKET": address.removeprefix("unix://"), "SIDECAR_LISTEN": ""}
        env |= {"SIDECAR_DATA_DIR": str(processes.directory / "data"), "SIDECAR_MEMORY_LIMIT_BYTES": str(256 << 20)}
        processes.start("sidecar", (sys.executable, "-m", "kv_sidecar"), partial(grpc_serves, address), env=env)
        self._pid, self._client = processes.pid("sidecar"), EngineSidecarClient(address)
        self._rank, self._ids = Rank(address, SHAPE, num_tokens), list(range(1, num_tokens + 1))
        self._rank.save(new_cache_ref(), self._ids)

    def close(self) -> None:
        """End the rank's threads and channels."""
        self._rank.side.shutdown()
        self._client.close()

    def measure(self) -> dict[str, float]:
        """Save the prompt once, by steps and its end."""
        side, facts, cache_ref = self._rank.side, self._rank.facts, new_cache_ref()
        transfer = KVTransfer(TENANT, "ctx_1", "r", (), cache_ref, round(time.time() * 1000) + 3_600_000)
        running = RunningSaves(sends_ahead=True)
        sent, engine_s = 0, 0.0
        others_s, sidecar_s = time.process_time() - time.thread_time(), _cpu_s(self._pid)
        for plan in self._plans(running, transfer, facts):
            sent += len(plan.token_ids)
            began_s = time.thread_time()
            side.start([], [plan])
            engine_s += time.thread_time() - began_s
            while plan.name not in side.take_results().ended_saves:
                time.sleep(0.001)
            running.ended(plan.name)
        others_s = time.process_time() - time.thread_time() - others_s
        sidecar_s = _cpu_s(self._pid) - sidecar_s
        if len(self._client.get_manifest(TENANT, cache_ref, 10)[0].token_ids) != self._num_tokens:
            raise RuntimeError("the save is not whole")
        return {
            "ids sent": sent / TOKEN_BYTES / self._num_tokens,
            "worker, CPU ms": 1000 * (others_s + engine_s),
            "sidecar, CPU ms": 1000 * sidecar_s,
        }

    def _plans(self, running: RunningSaves, transfer: KVTransfer, facts: Any) -> Iterator[SavePlan]:
        """Yield the plans of a prompt that is computed in steps, and of its end, as the scheduler makes them."""
        tables = (tuple(self._rank.old[: self._num_tokens // SHAPE.block_tokens]),)
        request = SimpleNamespace(
            request_id="r",
            num_computed_tokens=0,
            num_tokens=self._num_tokens + 1,
            num_prompt_tokens=self._num_tokens,
            arrival_time=1.0,
            all_token_ids=[*self._ids, 0],
        )
        state = SimpleNamespace(get_block_ids=lambda _: tables)
        step = SimpleNamespace(kv_connector_block_state=state, preempted_req_ids=None)
        running.watch(request, transfer, facts)
        while request.num_computed_tokens < self._num_tokens:
            request.num_computed_tokens += STEP_TOKENS
            yield from running.observe(step, facts, lambda _: False)
        first = running.planned_tokens("r")
        yield SavePlan(
            engine_request_id="r",
            tenant=TENANT,
            session_id="ctx_1",
            cache_ref=transfer.save or "",
            expires_at_ms=transfer.expires_at_ms,
            started_at_ms=round(time.time() * 1000),
            first_token=first,
            token_ids=b"",
            groups=facts.groups,
            block_ids=tables,
            fingerprint=facts.fingerprint,
        )


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process's threads that live, to the nanosecond."""
    spent = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, spent)) / 1e9


if __name__ == "__main__":
    sys.exit(main())
