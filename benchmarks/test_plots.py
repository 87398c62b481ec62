"""Pictures are well-formed, follow the reader's theme, and are those of the results that are kept."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.plots import DRAWN, PICTURES, README_SHOWS, digest, drawn
from benchmarks.result import RESULTS

KEPT = [name for name, (_, sources) in DRAWN.items() if all((RESULTS / f"{one}.json").exists() for one in sources)]


@pytest.mark.parametrize("name", README_SHOWS)
def test_a_picture_is_that_of_the_result_that_is_kept(name):
    first_line = (PICTURES / f"{name}.svg").read_text().partition("\n")[0]

    assert first_line == f"<!-- results {digest(name)} -->", "run `make plots`"


@pytest.mark.parametrize("name", KEPT)
def test_a_picture_is_svg_whose_ink_is_the_theme_s(name):
    picture = drawn(name)
    root = ET.fromstring(picture)

    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in picture
    assert "var(--ink)" in picture
    # Nothing is black or white by itself, so that all of it is seen on both.
    assert not {"#000000", "#ffffff", "#010203", "#040506"} & set(picture.replace(";", " ").replace('"', " ").split())


def test_every_result_that_is_drawn_is_kept():
    assert list(DRAWN) == KEPT
