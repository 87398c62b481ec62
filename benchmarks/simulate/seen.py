"""What a stretch of the simulation showed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.simulate.pods import Pod


@dataclass
class Seen:
    """What happened in a stretch of time."""

    turns: int = 0
    """Of contexts that were there."""
    creates: int = 0
    sessions: int = 0
    """Of both, those of contexts: kept conversations ask no manager."""
    tokens: int = 0
    """In prompts."""
    computed: int = 0
    restores: Counter[str] = field(default_factory=Counter)
    """Turns by where their KV was."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    prefixes: Counter[str] = field(default_factory=Counter)
    """Creates by where the shared beginning was."""
    stayed: int = 0
    """Turns on the pod of the one before."""
    not_saved: int = 0
    refused: int = 0
    lost: int = 0
    first_token_s: array[float] = field(default_factory=lambda: array("f"))


def spread(values: Sequence[int]) -> float:
    """Return how many times the mean the largest is."""
    return round(max(values) / max(float(np.mean(values)), 1e-9), 2)


def told(seen: Seen, pods: Sequence[Pod], took_s: float) -> dict[str, Any]:
    """Return what was seen in `took_s` of simulated time, for the report."""
    first_s = np.frombuffer(seen.first_token_s, dtype=np.float32)
    asked = seen.turns + seen.creates
    up = [pod for pod in pods if pod.is_up]
    return {
        "requests": asked,
        "turns": seen.turns,
        "sessions": seen.sessions,
        "hit_rate": round(1 - seen.computed / max(1, seen.tokens), 4),
        "restores": {what: round(number / max(1, seen.turns), 4) for what, number in sorted(seen.restores.items())},
        "prefixes": {what: round(number / max(1, seen.creates), 4) for what, number in sorted(seen.prefixes.items())},
        "stayed": round(seen.stayed / max(1, seen.turns), 4),
        "moved_gb": {what: round(size / 1e9, 1) for what, size in sorted(seen.moved_bytes.items())},
        "reasons": dict(sorted(seen.reasons.items())),
        "served_skew": spread([pod.served for pod in up]),
        "created_skew": spread([pod.created for pod in up]),
        "first_token_ms": {str(q): round(1e3 * float(np.percentile(first_s, q))) for q in (50, 95, 99)},
        "busy": {
            what: round(float(np.mean([pod.busy_s[what] for pod in up])) / took_s, 3)
            for what in ("compute", "batch", "disk", "fetch", "seal")
        },
        "not_saved": seen.not_saved,
        "refused": seen.refused,
        "lost": seen.lost,
    }
