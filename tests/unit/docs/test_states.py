"""Diagrams of state machines on the architecture page."""

from __future__ import annotations

from enum import Enum, auto

from contextcache.phases import Phases
from deploy.docs.states import drawn


class Lamp(Enum):
    ON = auto()
    OFF = auto()


def test_a_diagram_has_one_arrow_for_each_pair_of_phases() -> None:
    table = Phases(
        [((Lamp.ON,), "fuse_blows", Lamp.OFF), ((Lamp.ON,), "switch", Lamp.OFF), ((Lamp.OFF,), "switch", Lamp.ON)]
    )

    assert drawn(table) == (
        "```mermaid\nstateDiagram-v2\n    ON --> OFF: fuse blows, switch\n    OFF --> ON: switch\n```"
    )
