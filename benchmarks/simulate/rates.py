"""How fast things are in the simulation: measured where benchmarks/results has it, else assumed, and said so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.result import RESULTS
from gateway.pods.state import MOVED_TOKENS_PER_S

BYTES_PER_TOKEN = 131_072
"""Of a Llama-3-8B: 32 layers, 8 KV heads of 128, bfloat16."""
GIB = 1 << 30


@dataclass(frozen=True)
class Rates:
    """Of one pod with one GPU. Bytes and tokens a second, seconds, bytes."""

    host_bytes_per_s: float
    """Memory to engine (bench_transfer)."""
    disk_bytes_per_s: float
    """Disk to engine, nothing in the page cache (bench_transfer)."""
    sealed_bytes_per_s: float
    """Into the sidecar until it is on disk; what comes from a peer or the store has to be too (bench_transfer)."""
    wire_bytes_per_s: float = 3.1e9
    """Assumed: 25 Gbit/s to other pods and to the store."""
    computed_tokens_per_s: float = MOVED_TOKENS_PER_S
    """Assumed: what placement assumes."""
    step_s: float = 0.015
    """Assumed: one token of an answer, alone in the batch."""
    step_beside_s: float = 0.0003
    """Assumed: more of it for each other request in the batch."""
    batch_max: int = 64
    device_bytes: float = 50 * GIB
    """Assumed: an 80 GiB GPU less weights and activations."""
    host_bytes: float = 128 * GIB
    disk_bytes: float = 4096 * GIB
    pull_wait_s: float = 2.0
    """What a turn waits for KV from elsewhere (`lookup_wait_ms`): what takes longer is computed."""

    @property
    def save_wait_s(self) -> float:
        """What saves may be behind: half of the host's memory is lent to them. What comes then is not saved."""
        return self.host_bytes / 2 / self.sealed_bytes_per_s

    @property
    def fetched_bytes_per_s(self) -> float:
        """From a peer or the store."""
        return min(self.wire_bytes_per_s, self.sealed_bytes_per_s)

    @property
    def batch_tokens(self) -> float:
        """Tokens whose KV the engine holds."""
        return self.device_bytes / BYTES_PER_TOKEN

    def told(self) -> dict[str, Any]:
        """Return them for the report."""
        return asdict(self) | {"bytes_per_token": BYTES_PER_TOKEN}


@dataclass(frozen=True)
class ControlCosts:
    """CPU seconds of one turn in the control plane, each as if alone on its core."""

    gateway_s: float
    manager_s: float
    redis_s: float


def measured_rates() -> Rates:
    """Return what bench_transfer found for the KV of an 8B model."""
    rows = _result("bench_transfer")["rows"]
    of = {row["what"]: row["gb_s"] * 1e9 for row in rows if row["shape"] == "llama3-8b"}
    return Rates(of["load from memory"], of["load from disk, dropped"], of["save, until sealed"])


def control_costs() -> ControlCosts:
    """Return what bench_front found for a turn named by a header, 64 at a time: one look-up.

    A turn calls the manager three times, to look up, begin and commit; all are taken to cost the same.
    """
    [row] = [
        row
        for row in _result("bench_front")["rows"]
        if (row["kind"], row["size"], row["connections"], row["way"]) == ("requests", "small", 64, "envoy+plugin head")
    ]
    cpu_s = {part: us / 1e6 for part, us in row["cpu_us"].items()}
    return ControlCosts(cpu_s["gateway"], 3 * cpu_s["manager"], 3 * cpu_s["valkey"])


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found
