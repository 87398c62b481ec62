"""Where in a transcript each generation ended, so that a context can go back to it. Pure.

A generation is there as long as what it was is a leading part of the transcript: a commit that keeps fewer segments
takes it away for good. Nearly every commit adds as many segments as the one before, so a row says it in runs:
`7 1-5:2+2 7-7:6+0` was written at generation 7, where generation 1 ended after 2 segments, each of the next four after
2 more, and 7 after 6. The oldest runs go when there are too many. A manager of the release before commits without:
what was written at another generation than the row's says nothing any more.

`scripts/transcript.lua` states the same rules for Redis.
"""

from __future__ import annotations

import re
from typing import TypeAlias

RUNS_MAX = 32
"""Changes of rhythm that a row remembers, some 14 characters each."""
_RUN = re.compile(r"(\d{1,15})-(\d{1,15}):(\d{1,15})\+(\d{1,15})", re.ASCII)

Runs: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""First generation, last one, segments of the first, segments that each of the others has more; the oldest first."""


def runs_of(field: str, generation: int) -> Runs:
    """Return the runs of a row's field; none when they were written at another generation, or are none."""
    written_at, *entries = field.split(" ")
    found = [_RUN.fullmatch(entry) for entry in entries]
    if written_at != str(generation):
        return ()
    return tuple((int(run[1]), int(run[2]), int(run[3]), int(run[4])) for run in found if run)


def runs_field(runs: Runs, generation: int) -> str:
    """Return a row's field."""
    entries = (f" {first}-{last}:{segments}+{step}" for first, last, segments, step in runs)
    return f"{generation}{''.join(entries)}"


def segments_at(runs: Runs, generation: int) -> int | None:
    """Return how many leading segments a generation was; None: it is not there any more, or never was."""
    for first, last, segments, step in runs:
        if first <= generation <= last:
            return segments + step * (generation - first)
    return None


def runs_after(runs: Runs, generation: int, *, keep_segments: int, num_segments: int) -> Runs:
    """Return the runs behind a commit that made `generation`, kept `keep_segments` and left `num_segments`."""
    kept: list[tuple[int, int, int, int]] = []
    for first, last, segments, step in runs:
        if segments <= keep_segments:
            end = min(last, first + (keep_segments - segments) // step) if step else last
            kept.append((first, end, segments, step if end > first else 0))
    if kept and kept[-1][1] == generation - 1:
        first, last, segments, step = kept[-1]
        added = num_segments - segments - step * (last - first)
        if first == last or step == added:
            return (*kept[:-1], (first, generation, segments, added))
    return (*kept, (generation, generation, num_segments, 0))[-RUNS_MAX:]
