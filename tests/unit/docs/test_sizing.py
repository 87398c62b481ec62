"""docs/operations/sizing.md: each row of the table is what the formula says."""

import re
from pathlib import Path

DOC = (Path(__file__).parents[3] / "docs/operations/sizing.md").read_text()
ROWS = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| ([\d ]+) \| ([\d.]+) GiB \|$", DOC, re.MULTILINE)


def test_bytes_per_token_follow_from_the_shape():
    assert len(ROWS) > 8
    for model, layers, heads, head_size, per_token, gib in ROWS:
        bytes_per_token = int(layers) * 2 * int(heads) * int(head_size) * 2
        assert int(per_token.replace(" ", "")) == bytes_per_token, model
        assert float(gib) == round(bytes_per_token * 8000 / 2**30, 2), model
