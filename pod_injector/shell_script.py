r"""Finds simple commands in the script of `sh -c`, with the places where words could be appended. Pure.

This is no shell. It splits a script into words and operators as POSIX sh does (quotes, `\`, comments, `$(…)`,
backquotes), expands nothing, and gives up where a look at the text does not show what will run: here-documents,
process substitutions, unbalanced quotes, a word `$@` or `$*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"[0-9]*(?:&>>|&>|<<<|<<-?|<>|<&|>>|>&|>\||<|>)")
_BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_LENGTH_MAX = 128 << 10
"""Of one argument: execve's MAX_ARG_STRLEN."""
_KEYWORDS = frozenset({"then", "do", "else", "elif", "if", "while", "until", "{", "!", "time"})


class UnreadableScript(ValueError):
    """The script has a construct whose effect cannot be seen in its text."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word as the command will get it, but for expansions."""

    text: str
    """Without quotes; an expansion stands as it was written."""
    end: int
    """Offset in the script just after the word."""
    expands: bool
    """Whether the shell puts something else in place of a part of it."""


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """Words of one command, without redirections, assignments and keywords before it."""

    words: tuple[Word, ...]


def simple_commands(script: str) -> list[SimpleCommand]:
    """Return the commands of a script in their order. Raises UnreadableScript."""
    if len(script) > _LENGTH_MAX:
        raise UnreadableScript("it is longer than Linux allows")
    commands: list[SimpleCommand] = []
    words: list[Word] = []
    for word in [*_words(script), None]:
        if word is not None:
            words.append(word)
        elif words:
            commands.append(SimpleCommand(_without_prefix(words)))
            words = []
    return [command for command in commands if command.words]


def _without_prefix(words: list[Word]) -> tuple[Word, ...]:
    skipped = 0
    while skipped < len(words) and (words[skipped].text in _KEYWORDS or _ASSIGNMENT.match(words[skipped].text)):
        skipped += 1
    return tuple(words[skipped:])


def _words(script: str) -> Iterator[Word | None]:
    """Yield words, and None where a command ends. The target of a redirection is no word."""
    at, is_target = 0, False
    while at < len(script):
        if blank := _BLANK.match(script, at) or _COMMENT.match(script, at):
            at = blank.end()
        elif redirection := _REDIRECTION.match(script, at):
            if redirection.group().lstrip("0123456789") in {"<<", "<<-"}:
                raise UnreadableScript("it has a here-document")
            if script.startswith("(", redirection.end()):
                # A word of the command, not the end of its words: what comes before it may be an option of that value.
                raise UnreadableScript("it has a process substitution")
            at, is_target = redirection.end(), True
        elif operator := _OPERATOR.match(script, at):
            at, is_target = operator.end(), False
            yield None
        else:
            word = _word(script, at)
            at = word.end
            if not is_target:
                yield word
            is_target = False


def _word(script: str, start: int) -> Word:
    text: list[str] = []
    at, expands = start, False
    while at < len(script) and script[at] not in " \t\r\n;&|()<>":
        character = script[at]
        if character == "'":
            end = _find(script, "'", at + 1)
            text.append(script[at + 1 : end])
            at = end + 1
        elif character == '"':
            piece, at, found = _double_quoted(script, at + 1)
            text.append(piece)
            expands |= found
        elif character == "\\":
            text.append(script[at + 1 : at + 2].replace("\n", ""))
            at += 2
        elif script.startswith("$'", at):
            raise UnreadableScript("it has a quote that shells read differently")
        elif character in "$`":
            end = _expansion_end(script, at)
            text.append(script[at:end])
            at, expands = end, True
        else:
            text.append(character)
            at += 1
    return _checked(Word("".join(text), min(at, len(script)), expands))


def _checked(word: Word) -> Word:
    if word.expands and re.search(r"\$\{?[@*]", word.text):
        raise UnreadableScript("it passes on arguments by $@ or $*")
    return word


def _double_quoted(script: str, start: int) -> tuple[str, int, bool]:
    """Return text, the offset after the closing quote, and whether something is expanded."""
    text: list[str] = []
    at, expands = start, False
    while at < len(script):
        character = script[at]
        if character == '"':
            return "".join(text), at + 1, expands
        if character == "\\" and script[at + 1 : at + 2] in {'"', "\\", "$", "`", "\n"}:
            text.append(script[at + 1].replace("\n", ""))
            at += 2
        elif character in "$`":
            end = _expansion_end(script, at)
            text.append(script[at:end])
            at, expands = end, True
        else:
            text.append(character)
            at += 1
    raise UnreadableScript("a quote is not closed")


def _expansion_end(script: str, at: int) -> int:
    """Return the offset after `$name`, `${…}`, `$(…)` or a backquoted command that begins at `at`."""
    if script[at] == "`":
        return _find(script, "`", at + 1) + 1
    following = script[at + 1 : at + 2]
    if following in {"(", "{"}:
        return _balanced_end(script, at + 1, following, {"(": ")", "{": "}"}[following])
    name = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]").match(script, at + 1)
    return name.end() if name else at + 1


def _balanced_end(script: str, start: int, opening: str, closing: str) -> int:
    depth, at = 0, start
    while at < len(script):
        character = script[at]
        if character == "\\":
            at += 1
        elif character == "'":
            at = _find(script, "'", at + 1)
        elif character == '"':
            at = _double_quoted(script, at + 1)[1] - 1
        elif character == opening:
            depth += 1
        elif character == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise UnreadableScript("a bracket is not closed")


def _find(script: str, character: str, start: int) -> int:
    found = script.find(character, start)
    if found < 0:
        raise UnreadableScript("a quote is not closed")
    return found
