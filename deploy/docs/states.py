"""State machines as diagrams: the rows of a `Phases` table in Mermaid's notation, which reads as text too."""

from __future__ import annotations

import importlib
from collections import defaultdict

from contextcache.phases import Phases


def states_diagram(name: str) -> str:
    """Return the diagram of a table that is named by module and attribute, such as `kv_sidecar.blocks.PHASES`."""
    module, _, attribute = name.rpartition(".")
    return drawn(getattr(importlib.import_module(module), attribute))


def drawn(phases: Phases) -> str:  # type: ignore[type-arg]  # any machine
    """Return one arrow for each pair of phases, with the events that lead from the first to the second."""
    events: dict[tuple[str, str], list[str]] = defaultdict(list)
    for move in phases:
        events[move.start.name, move.end.name].append(move.event.replace("_", " "))
    arrows = [f"    {start} --> {end}: {', '.join(names)}" for (start, end), names in events.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *arrows, "```"])
