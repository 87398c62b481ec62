"""Diagrams of state machines on the architecture page."""

from __future__ import annotations

import re
from enum import Enum, auto
from pathlib import Path

import pytest

from contextcache.phases import Phases
from deploy.docs.states import drawn, states_diagram

PAGE = (Path(__file__).resolve().parents[3] / "docs/architecture.md").read_text()
TABLES = ("kv_sidecar.blocks.PHASES", "kv_sidecar.refs.PHASES", "vllm_plugin.turn.resuming.PHASES")


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


@pytest.mark.parametrize("name", TABLES)
def test_the_page_draws_the_table_of_the_code(name: str) -> None:
    block = re.search(rf"<!-- generated: states {re.escape(name)} -->(.*?)<!-- /generated -->", PAGE, re.DOTALL)

    assert block is not None
    assert block[1].strip() == states_diagram(name)
