"""The measure of language finds sentences where users read them, and no code."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.docs.language import HEADLESS_NOTES, LONGEST_SENTENCE, measured
from deploy.docs.passages import Passage, console, markdown, monitoring, notes, product, templates, values

PAGE = """---
title: front matter is no prose
---

# Heading

A `code span here` counts once. It ends
on the next [line](https://example.org/a/b).

!!! note "title"
    An indented note.

```bash
no prose
```

| a cell | `x` |
| --- | --- |
| more | less |
"""

MODULE = '''
@app.command()
def show():
    """Show it."""
    _log.info("a log phrase")
    Counter("name", "a metric text")
    Option(help="a help text")
    raise InvalidRequest(f"context {name} is gone")
    print("printed text")
'''


def texts(passages: object) -> list[str]:
    return [passage.text for passage in passages]


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_prose_of_a_page_is_its_text_without_code(tmp_path):
    page = written(tmp_path, "page.md", PAGE)

    found = list(markdown(page))

    assert texts(found) == [
        "Heading", "A `code` counts once. It ends on the next line.", "An indented note.",
        "a cell", "`code`", "more", "less",
    ]  # fmt: skip
    assert [passage.line for passage in found[:3]] == [5, 7, 11]


def test_prose_of_a_module_has_its_surface(tmp_path):
    """Seen to fail with errors that are f-strings left out."""
    found = {(surface, passage.text) for surface, passage in product(written(tmp_path, "module.py", MODULE))}

    assert found == {
        ("help", "Show it."), ("logs", "a log phrase"), ("metrics", "a metric text"), ("help", "a help text"),
        ("errors", "context {} is gone"),
    }  # fmt: skip


def test_comments_of_values_are_joined_and_examples_left_out(tmp_path):
    text = "# -- first\n# goes on\n# -- second\na: 1  # @schema {}\n#\n#   b: 2\n"

    assert texts(values(written(tmp_path, "values.yaml", text))) == ["first goes on", "second"]


def test_messages_of_templates_and_strings_of_the_console_are_read(tmp_path):
    template = written(tmp_path, "a.yaml", '{{ fail (printf "a must be \\"b\\"" .b) }}\n')
    script = written(tmp_path, "a.js", 'import x from "./a b c.js"\nf("Sign out", "row", `Cached ${n}`)\n')

    assert texts(templates(template)) == ['a must be \\"b\\"']
    assert texts(console(script)) == ["Sign out", "Cached {}"]


def test_texts_of_alerts_and_panels_are_read(tmp_path):
    alerts = written(
        tmp_path, "alerts.yaml", '  summary: A gateway\n  expr: up\n  description: "It is {{ $value }}."\n'
    )

    assert texts(monitoring(alerts)) == ["A gateway", "It is {{ $value }}."]
    assert texts(monitoring(written(tmp_path, "a.json", '"title": "Turns",\n"unit": "s"\n'))) == ["Turns"]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("It is what nobody reads. Whoever", ["what", "who", "who"]),
        ("word " * LONGEST_SENTENCE, []),
        ("word " * LONGEST_SENTENCE + "more", ["long"]),
        ("word " * LONGEST_SENTENCE + "end. " + "Word " * 30, ["long"]),
        ("Whatever, whose", []),
    ],
)
def test_findings_of_a_text(text, kinds):
    """The fourth: seen to fail with the words of a paragraph in place of those of a sentence."""
    assert [finding.kind for finding in measured([Passage(Path("a"), 1, text)]).findings] == kinds


def test_a_surface_is_above_its_bars_by_rate():
    """Seen to fail with a bar that ignores the number of words."""
    once = [Passage(Path("a"), 1, "What. " + "Word. " * 999)]

    assert not measured(once).above_bars()
    assert measured(once * 4 + [Passage(Path("a"), 1, "what")] * 9).above_bars()


def test_notes_are_docstrings_and_comments_without_orders_to_tools(tmp_path):
    """Seen to fail with docstrings of attributes left out."""
    text = '"""Content."""\nSIZE = 1  # why\n"""Unit."""\nx = y  # type: ignore[misc]  # reason\n'

    assert sorted(texts(notes(written(tmp_path, "module.py", text)))) == ["Content.", "Unit.", "why"]


def test_notes_without_a_noun_are_counted_and_long_sentences_are_not():
    """Seen to fail with the bar of long sentences applied to notes."""
    long = [Passage(Path("a"), 1, "word " * (LONGEST_SENTENCE + 1))]
    headless = [Passage(Path("a"), 1, "Of a rate, each sample.")]

    assert not measured(long, of_notes=True).above_bars()
    assert not measured(headless * HEADLESS_NOTES, of_notes=True).above_bars()
    assert measured(headless * (HEADLESS_NOTES + 1), of_notes=True).above_bars()
    assert not measured(headless * (HEADLESS_NOTES + 1)).above_bars()
