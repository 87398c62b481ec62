"""The figures as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.local.table import render

_TITLES = {
    "requests": "whole answers, {size} body, {connections} connections (CPU in µs a request)",
    "stream": "streams of 200 chunks at full speed, {connections} connections (times: first chunk; CPU in µs a chunk)",
    "paced": "streams of 200 chunks, one in 10 ms, {connections} at once, while all flow (CPU above idle, µs a chunk)",
}


def tables(report: Mapping[str, Any]) -> str:
    """Return every table the report has figures for."""
    parts = []
    rows = report.get("rows", [])
    for key in dict.fromkeys((row["kind"], row["size"], row["connections"]) for row in rows):
        chosen = [row for row in rows if (row["kind"], row["size"], row["connections"]) == key]
        title = _TITLES[key[0]].format(size=key[1], connections=key[2])
        parts.append(f"{title}\n{_cell_table(chosen)}")
    if report.get("idle"):
        parts.append(f"1 000 idle streams: memory grown, KiB a stream\n{_idle_table(report['idle'])}")
    if report.get("real"):
        parts.append(f"beside real vLLM, tokens/s\n{_real_table(report['real']['rows'])}")
    parts.append(_bar_table(report["bars"]))
    return "\n\n".join(parts)


def _cell_table(rows: Sequence[Mapping[str, Any]]) -> str:
    stream = rows[0]["kind"] != "requests"
    heads = [
        "way",
        "p50 ms",
        "p99 ms",
        "added p50",
        "chunks/s" if stream else "req/s",
        "CPU µs",
        "of which",
        "load gen",
    ]
    cells = [
        [
            row["way"],
            _text(row["p50_ms"], 2),
            _text(row["p99_ms"], 2),
            _text(row["added_p50_ms"], 2),
            _text(row["chunks_per_s"] if stream else row["per_s"], 0),
            _text(row["cpu_us_total"], 1 if stream else 0),
            _split(row["cpu_us"], 1 if stream else 0),
            f"{row['load_share']:.0%}"
            + (f"  {row['errors']} ERRORS {row['first_errors'][:1]}" if row["errors"] else ""),
        ]
        for row in rows
    ]
    return render(heads, cells)


def _idle_table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["way", "streams", "KiB", "of which", "errors"]
    cells = [
        [
            row["way"],
            str(row["streams"]),
            _text(row["kib_per_stream_total"], 1),
            _split(row["kib_per_stream"], 1),
            f"{row['errors']} {row['first_errors'][:1]}" if row["errors"] else "-",
        ]
        for row in rows
    ]
    return render(heads, cells)


def _real_table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["way", "tokens/s", "min", "max", "of direct", "min ", "max "]
    cells = [
        [
            row["way"],
            *(_text(row[key], 1) for key in ("tokens_per_s", "tokens_per_s_min", "tokens_per_s_max")),
            *(f"{row[key]:.1%}" for key in ("of_direct", "of_direct_min", "of_direct_max")),
        ]
        for row in rows
    ]
    return render(heads, cells)


def _bar_table(bars: Sequence[Mapping[str, Any]]) -> str:
    words = {True: "pass", False: "FAIL", None: "not measured"}
    return render(
        ["bar", "measured", "limit", ""],
        [[bar["bar"], _text(bar["measured"], 3), bar["limit"], words[bar["met"]]] for bar in bars],
    )


def _split(by_part: Mapping[str, float | None], digits: int) -> str:
    return ", ".join(f"{part} {_text(value, digits)}" for part, value in by_part.items() if value) or "-"


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
