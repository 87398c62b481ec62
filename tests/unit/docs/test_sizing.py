"""docs/sizing.md: each row of the table is what the formula says."""

import re
from pathlib import Path

import pytest

DOC = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text()
ROWS = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| ([\d ]+) \| ([\d.]+) GiB \|$", DOC, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_bytes_per_token_follow_from_the_shape(row):
    _, layers, heads, head_size, per_token, gib = row
    bytes_per_token = int(layers) * 2 * int(heads) * int(head_size) * 2

    assert int(per_token.replace(" ", "")) == bytes_per_token
    assert float(gib) == round(bytes_per_token * 8000 / 2**30, 2)


def test_the_table_was_read():
    assert len(ROWS) > 8
