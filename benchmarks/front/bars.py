"""What the fronts have to reach, and whether they did. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.front.measure import DIRECT, ENVOY, SMALL

PLUGIN_WAYS = ("envoy+plugin head", "envoy+plugin body")
PLUGIN_ADDS_MS = 1.5
PLUGIN_CHUNK_RATIO = 1.10
FRONT = "http front"
FRONT_ADDS_MS = 0.7
LITELLM_TIMES = 3.0
REAL_SHARE = 0.96

Rows = Sequence[Mapping[str, Any]]


def stub_bars(rows: Rows) -> list[dict[str, Any]]:
    """Return the bars of the run over the stub engine. Latency is compared at one connection: no queue in it."""
    bars = []
    for way in PLUGIN_WAYS:
        row, base = _find(rows, "requests", 1, way), _find(rows, "requests", 1, ENVOY)
        added = None if row is None else row["added_p50_ms_over_envoy"]
        bars.append(_bar(f"{way}: adds p50 ms over Envoy alone", added, "<=", PLUGIN_ADDS_MS, (row, base)))
    for way in PLUGIN_WAYS:
        row, base = _find(rows, "paced", 64, way), _find(rows, "paced", 64, ENVOY)
        ratio = _ratio(row, base, "cpu_us_total")
        bars.append(_bar(f"{way}: CPU per chunk / Envoy alone", ratio, "<=", PLUGIN_CHUNK_RATIO, (row, base)))
    row, base = _find(rows, "requests", 1, FRONT), _find(rows, "requests", 1, DIRECT)
    added = None if row is None else row["added_p50_ms"]
    bars.append(_bar(f"{FRONT}: adds p50 ms over direct", added, "<=", FRONT_ADDS_MS, (row, base)))
    row, base = _find(rows, "requests", 16, FRONT), _find(rows, "requests", 16, "litellm")
    bars.append(_bar(f"{FRONT}: requests/s / litellm", _ratio(row, base, "per_s"), ">=", LITELLM_TIMES, (row, base)))
    return bars


def real_bars(shares: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the bars of the run beside a real engine; `shares` are of direct throughput by way."""
    return [_bar(f"{way}: tokens/s / direct, real vLLM", share, ">=", REAL_SHARE, ()) for way, share in shares.items()]


def _bar(name: str, measured: float | None, sign: str, limit: float, of: Sequence[Any]) -> dict[str, Any]:
    """`met` is None when it was not measured; requests that failed meet nothing."""
    met = None
    if measured is not None:
        met = (measured <= limit if sign == "<=" else measured >= limit) and not any(row["errors"] for row in of)
    return {
        "bar": name,
        "measured": None if measured is None else round(measured, 3),
        "limit": f"{sign} {limit}",
        "met": met,
    }


def _find(rows: Rows, kind: str, connections: int, way: str) -> Mapping[str, Any] | None:
    wanted = (kind, SMALL, connections, way)
    return next((row for row in rows if (row["kind"], row["size"], row["connections"], row["way"]) == wanted), None)


def _ratio(row: Mapping[str, Any] | None, base: Mapping[str, Any] | None, key: str) -> float | None:
    if row is None or base is None or row[key] is None or not base[key]:
        return None
    return float(row[key] / base[key])
