"""docs/operations/pod-injector.md lists every reason, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from pod_injector.engine_container import Reason

DOC = (Path(__file__).parents[3] / "docs/operations/pod-injector.md").read_text()


def test_the_page_lists_every_reason():
    table = DOC.partition("## When a pod is left alone")[2].partition("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall("`([a-z-]+)`", row)
    }

    # Who did not ask is not told.
    assert listed == {reason.value for reason in Reason} - {"opted-out"}
