"""The parts of the suite as a table: what each proves, when it runs, where its tests are."""

from __future__ import annotations

import os

from deploy.docs.blocks import table
from tests.suite.parts import PARTS, Part


def parts_table(_name: str) -> str:
    """Return the table; its links are for tests/README.md."""
    rows = ([f"`{part.name}`", part.tier, part.proves, _places(part)] for part in PARTS)
    return table(["part", "tier", "proves", "where"], rows)


def _places(part: Part) -> str:
    modules = (part.module.replace(".", "/"),) if part.module else ()
    places = dict.fromkeys(os.path.relpath(place, "tests") for place in (*part.paths, *modules))
    return ", ".join(f"[{place}{'' if place.endswith('.py') else '/'}]({place})" for place in places)
