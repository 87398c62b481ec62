"""README.md is short: lines, links, and words in a sentence. Its calls run in tests/vllm/test_examples.py."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

from deploy.docs.language import ROOT, sentences
from deploy.docs.passages import markdown

README = ROOT / "README.md"
LINES_MAX, LINKS_MAX, MEAN_WORDS_MAX = 100, 20, 16


def sentence_lengths(page: Path) -> list[int]:
    """Return the words of each sentence in paragraphs and lists: headings and cells would make the mean smaller."""
    lines = page.read_text().splitlines()
    prose = [passage.text for passage in markdown(page) if not lines[passage.line - 1].startswith(("#", "|"))]
    return [len(sentence.split()) for text in prose for sentence in sentences(text)]


def test_the_readme_is_short():
    """Seen to fail with the page of 2026-11-28: 189 lines, 75 links, 18.3 words a sentence."""
    text = README.read_text()

    assert len(text.splitlines()) <= LINES_MAX
    assert text.count("](") <= LINKS_MAX
    assert mean(sentence_lengths(README)) <= MEAN_WORDS_MAX


def test_the_readme_sets_everything_up_with_two_commands():
    """Seen to fail with `make up` written as `make install && make up`."""
    (block,) = re.findall(r"## Install and run\n.*?```sh\n(.*?)```", README.read_text(), re.DOTALL)

    assert [line.partition("#")[0].strip() for line in block.splitlines()] == ["make up", "make demo"]
