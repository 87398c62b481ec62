"""The prose of a source file, without code: Markdown, comments of values.yaml, texts in Python and JavaScript."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

_MARKDOWN = MarkdownIt("commonmark").enable("table").disable("code")
"""Indented text is prose: mkdocs indents the text of tabs and admonitions."""
_LOGS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
_METRICS = frozenset(
    {"Counter", "Gauge", "Histogram", "Info", "GaugeMetricFamily", "CounterMetricFamily", "counter", "gauge"}
)
_HELP = frozenset({"Option", "Argument", "Typer", "add_argument", "ArgumentParser", "command", "callback"})


class Passage(NamedTuple):
    """A paragraph, a table's cell, a comment or a string literal."""

    path: Path
    line: int
    text: str


def markdown(page: Path) -> Iterator[Passage]:
    """Yield paragraphs, headings, list items and cells; a code span counts as one word."""
    if not page.exists():
        return
    text = re.sub(r"\A---\n.*?\n---\n", lambda front: "\n" * front[0].count("\n"), page.read_text(), flags=re.DOTALL)
    line = 1
    for token in _MARKDOWN.parse(re.sub(r"^( *)(?:!!!|\?\?\?\+?|===) .*$", r"\1", text, flags=re.MULTILINE)):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            yield Passage(page, line, "".join(_text(child) for child in token.children or []))


def _text(token: Token) -> str:
    if token.type == "code_inline":
        return "`code`"
    return token.content if token.type == "text" else " " * (token.type in {"softbreak", "hardbreak"})


def values(file: Path) -> Iterator[Passage]:
    """Yield comments. Lines of one comment are one passage; `# -- ` begins a new one. Indented lines are examples."""
    start, parts = 0, list[str]()
    for number, line in enumerate([*file.read_text().splitlines(), ""], 1):
        comment = re.match(r"\s*# ?(?P<text>(?!-{5}|\s{2,}|@schema).*)$", line)
        text = comment["text"] if comment else ""
        if parts and (not text or text.startswith("-- ")):
            yield Passage(file, start, " ".join(parts))
            parts = []
        if text:
            start = start if parts else number
            parts.append(text.removeprefix("-- "))


def templates(file: Path) -> Iterator[Passage]:
    """Yield the messages with which a template refuses values."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        for message in re.findall(r'\bfail \(?(?:printf )?"((?:[^"\\]|\\.)*)"', line):
            yield Passage(file, number, message)


def monitoring(file: Path) -> Iterator[Passage]:
    """Yield the texts of alerts and of the dashboard's panels."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        for text in re.findall(r'^\s*"?(?:summary|description|title)"?: "?(.+?)"?,?$', line):
            yield Passage(file, number, text)


def console(script: Path) -> Iterator[Passage]:
    """Yield the strings of the console that are words: a capital first, or three words and more."""
    for number, line in enumerate(script.read_text().splitlines(), 1):
        if not line.lstrip().startswith(("//", "import ", "*", "/*")):
            for _, text in re.findall(r"""(["'`])((?:(?!\1)[^\\]|\\.)*)\1""", line):
                if re.match(r"[A-Z][a-z]|(?:\S+ ){2}", text):
                    yield Passage(script, number, re.sub(r"\$\{[^}]*\}", "{}", text))


def notes(module: Path) -> Iterator[Passage]:
    """Yield docstrings, of attributes too, and comments; orders to tools such as `noqa` are no prose."""
    text = module.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(module, node.lineno, node.value.value.strip())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comment = token.string.lstrip("#: ")
        if token.type == tokenize.COMMENT and not re.match(r"(?:noqa|type: ignore|fmt:|pragma)", comment):
            yield Passage(module, token.start[0], comment)


def product(module: Path) -> Iterator[tuple[str, Passage]]:
    """Yield a module's error messages, help texts, log phrases and metric descriptions, each with its surface."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            surface, places = _surface(node)
            for place in places:
                for text in _literals(place):
                    yield surface, Passage(module, place.lineno, text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_is_command, node.decorator_list)):
            yield "help", Passage(module, node.lineno, ast.get_docstring(node) or "")


def _surface(call: ast.Call) -> tuple[str, list[ast.expr]]:
    """Return where users read a call's texts, and the arguments that hold them."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Attribute) and name in _LOGS and "log" in ast.unparse(function.value).lower():
        return "logs", call.args[:1]
    if name in _METRICS:
        return "metrics", call.args[1:2]
    if name in _HELP:
        return "help", [word.value for word in call.keywords if word.arg in {"help", "description", "epilog"}]
    if re.search(r"Error$|^BadParameter$|^exit$", name) or name in _errors():
        return "errors", call.args
    return "", []


def _literals(place: ast.expr) -> Iterator[str]:
    """Yield an expression's texts; a value put into an f-string is `{}`."""
    if isinstance(place, ast.Constant) and isinstance(place.value, str) and " " in place.value:
        yield place.value
    elif isinstance(place, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in place.values)
    elif isinstance(place, ast.BinOp | ast.IfExp):
        for child in (place.left, place.right) if isinstance(place, ast.BinOp) else (place.body, place.orelse):
            yield from _literals(child)


def _is_command(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith((".command", ".callback"))


@cache
def _errors() -> frozenset[str]:
    """Return the names of our error classes."""
    tree = ast.parse((Path(__file__).resolve().parents[2] / "contextcache/errors.py").read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.ClassDef))
