"""`python -m deploy.docs.language`: measure the sentences that users and readers of the code read; fail above the bars.

`python -m deploy.docs.language docs/envoy.md errors` lists every finding of these files and surfaces.
proselint (`deploy/docs/proselint.json`) checks general style in the same `make lint`. This module holds the rules that
no linter on a package index has: densities per 1 000 words, and sentences in Python, YAML and JavaScript sources.
Vale and its index packages download a program from GitHub; textlint needs 195 packages for its rule on length alone.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from deploy.docs.passages import Passage, console, markdown, monitoring, notes, product, templates, values

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SENTENCE = 35
"""Words a sentence may have. Aim at 25."""
BARS = {"what": 3.0, "who": 1.0}
"""Occurrences per 1 000 words of a surface."""
WORDS = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "who": re.compile(r"\b(?:nobody|somebody|whoever|who)\b", re.IGNORECASE),
}
HEADLESS = re.compile(r"(?:Of|Those|What|Who|Whose|The same|By which|As long|Some|Up to|With|For|Until|Behind|From)\b")
"""First words of a note without a noun or a verb. Notes of 200 characters and more tell their subject later."""
HEADLESS_NOTES = 10
"""Notes that may begin so, in all packages together."""
NOTES = ["contextcache", "context_manager", "gateway", "integrations", "kv_sidecar", "pod_injector", "vllm_plugin"]
"""Packages whose docstrings and comments are measured."""
PACKAGES = ["contextcache", "context_manager", "kv_sidecar", "vllm_plugin", "integrations", "gateway", "pod_injector"]
_SENTENCE = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[\"'”)*_]*\s+")
_WORD = re.compile(r"\S*[A-Za-z0-9]\S*")


class Finding(NamedTuple):
    """A place that a writer should look at."""

    kind: str
    path: Path
    line: int
    text: str

    @override
    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.kind}: {self.text}"


class Figures(NamedTuple):
    """Measurements of one surface."""

    words: int
    sentences: int
    findings: list[Finding]
    of_notes: bool

    def per_1000(self, kind: str) -> float:
        """Return the findings of a kind per 1 000 words."""
        return 1000 * sum(finding.kind == kind for finding in self.findings) / max(1, self.words)

    def above_bars(self) -> bool:
        """Tell whether a bar is exceeded. Notes have no bar for long sentences, but one for their first words."""
        late = self.per_1000("long") > 0 and not self.of_notes
        headless = sum(finding.kind == "headless" for finding in self.findings) > HEADLESS_NOTES
        return any(self.per_1000(kind) > bar for kind, bar in BARS.items()) or late or headless


def sentences(text: str) -> list[str]:
    """Split a passage at its full stops."""
    return [" ".join(sentence.split()) for sentence in _SENTENCE.split(text) if sentence.strip()]


def measured(passages: Iterable[Passage], *, of_notes: bool = False) -> Figures:
    """Count words, and find long sentences and the words that have a bar; in notes also beginnings without a noun."""
    words, count, findings = 0, 0, []
    for passage in passages:
        if of_notes and HEADLESS.match(passage.text) and len(passage.text) < 200:
            findings.append(Finding("headless", passage.path, passage.line, " ".join(passage.text.split())))
        for sentence in sentences(passage.text):
            length = len(_WORD.findall(sentence))
            words, count = words + length, count + 1
            hits = [kind for kind, word in WORDS.items() for _ in word.findall(sentence)]
            if length > LONGEST_SENTENCE:
                hits.append("long")
            findings += [Finding(kind, passage.path, passage.line, sentence) for kind in hits]
    return Figures(words, count, findings, of_notes)


def surfaces() -> Iterator[tuple[str, Passage]]:
    """Yield every passage that users read, with its surface."""
    pages = [
        ROOT / name
        for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md", "deploy/client/README.md")
    ]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    yield from (("readme", passage) for passage in markdown(ROOT / "README.md"))
    yield from (("docs", passage) for page in pages for passage in markdown(page))
    yield from (("values", passage) for passage in values(ROOT / "charts/context-cache/values.yaml"))
    for template in sorted((ROOT / "charts/context-cache/templates").rglob("*.yaml")):
        yield from (("chart", passage) for passage in templates(template))
    for file in ("alerts.yaml", "dashboard.json"):
        yield from (("metrics", passage) for passage in monitoring(ROOT / "charts/context-cache/files" / file))
    for folder in PACKAGES:
        for module in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in module.name:
                yield from product(module)
                yield from (("notes", passage) for passage in notes(module) if folder in NOTES)
    for script in sorted((ROOT / "gateway/console/page").glob("*.js")):
        yield from (("console", passage) for passage in console(script))


def main() -> None:
    """Print the table and the findings; exit 1 when a surface exceeds a bar."""
    asked = set(sys.argv[1:])
    by_surface: dict[str, list[Passage]] = defaultdict(list)
    for surface, passage in surfaces():
        by_surface[surface].append(passage)
    failed = []
    print(f"{'surface':10}{'words':>8}{'per sentence':>14}{'what/1000':>11}{'who/1000':>10}{'over 35':>9}")
    for surface, passages in by_surface.items():
        figures = measured(passages, of_notes=surface == "notes")
        mean = figures.words / max(1, figures.sentences)
        late = sum(finding.kind == "long" for finding in figures.findings)
        rates = f"{figures.per_1000('what'):11.1f}{figures.per_1000('who'):10.1f}"
        print(f"{surface:10}{figures.words:8}{mean:14.1f}{rates}{late:9}")
        above = figures.above_bars()
        failed += [surface] * above
        for finding in figures.findings:
            if (
                (above and not (finding.kind == "long" and figures.of_notes))
                or surface in asked
                or str(finding.path.relative_to(ROOT)) in asked
            ):
                print(f"  {finding}")
    if failed:
        sys.exit(f"above the bars (what {BARS['what']}, who {BARS['who']}, no sentence over 35): {', '.join(failed)}")


if __name__ == "__main__":
    main()
