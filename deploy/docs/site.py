"""Hooks of the documentation site (mkdocs.yml): pages from outside docs/, drawn results, and links that leave docs/.

The chart's reference, the changelog, and the pages on contributing and security stand outside docs/, where readers of
the repository look for them. The site shows them as its own pages. A link to any other file of the repository leads to
`repo_url`, and is plain text without it. A link to a missing file fails a strict build. Pictures of results are drawn
here; only the README's is a file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.plots import DRAWN, drawn

ROOT = Path(__file__).resolve().parents[2]
BORROWED = {
    "charts/context-cache/README.md": "reference/chart.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""Files outside docs/ that are pages of the site: path in the repository, path in docs/."""
PICTURES = {f"docs/pictures/{name}.svg": name for name in DRAWN}
"""Pictures of results: path in the repository, name of the drawing."""
BOOSTED = {"operations/troubleshooting.md": 4}
"""Pages that the search ranks higher, and by how much: their headings are sentences of common words."""
_LINK = re.compile(
    r"```.*?```|`[^`\n]*`|(?P<text>\[[^\[\]]*\])\((?P<path>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)", re.DOTALL
)
_log = get_plugin_logger("site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and the pictures."""
    for source, page in BORROWED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path, name in PICTURES.items():
        if not (ROOT / path).exists():
            files.append(File.generated(config, path.removeprefix("docs/"), content=drawn(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Return the page with the links that leave docs/ turned into links that the site can follow."""
    shown = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTED.get(shown, 1)}
    source = next((name for name, borrowed in BORROWED.items() if borrowed == shown), f"docs/{shown}")

    def follow(link: re.Match[str]) -> str:
        path, anchor = link["path"], link["anchor"] or ""
        if path is None or re.match(r"[a-z]+:", path):
            return link[0]
        target = os.path.normpath(Path(source).parent / path)
        if target not in PICTURES and not (ROOT / target).exists():
            _log.warning("%s: no file %s", source, target)
        target += "/README.md" if (ROOT / target / "README.md").exists() else ""
        inside = BORROWED.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if inside:
            return f"{link['text']}({os.path.relpath(inside, Path(shown).parent)}{anchor})"
        if not config.repo_url:
            return link["text"][1:-1]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{link['text']}({config.repo_url.rstrip('/')}/{kind}/main/{target}{anchor})"

    return _LINK.sub(follow, markdown)
