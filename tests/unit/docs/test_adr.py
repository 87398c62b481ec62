"""Decisions (docs/adr): every named one exists, and each has a status, a date, its sections and an index line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
ADR = ROOT / "docs" / "adr"
DECISIONS = {page.name[:4]: page for page in ADR.glob("[0-9]*.md")}
SECTIONS = ["Context", "Decision", "Alternatives", "Consequences"]
NAMED = r"(?:\bADRs? |\badr/)([0-9]{4})\b"


def test_every_decision_that_is_named_exists():
    """Seen to fail with a decision that pyproject.toml named deleted."""
    found = subprocess.run(
        ["git", "grep", "-nIoP", NAMED, "--", ".", ":!CHANGELOG.md", ":!changes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    assert len(found) > 50
    assert [line for line in found if line[-4:] not in DECISIONS] == []


def test_each_decision_has_a_status_a_date_sections_and_an_index_line():
    """Seen to fail with a date, a section and an index line taken out."""
    index = (ADR / "README.md").read_text()
    head = r"# {} (.+)\n\n- Status: accepted.*\n- Date: 20\d\d-\d\d-\d\d\n\n## Context\n"
    for number, page in DECISIONS.items():
        text = page.read_text()
        title = re.match(head.format(number), text)

        assert title, text[:120]
        assert re.findall(r"^## (Context|Decision|Alternatives|Consequences)$", text, re.MULTILINE) == SECTIONS, page
        assert f"| [{number}]({page.name}) | {title[1]} |" in index
