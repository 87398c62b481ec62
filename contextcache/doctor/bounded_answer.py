"""Reads an answer that whoever sends it may never end: so many bytes, so many seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

_BYTES_MAX = 16 << 20
"""A gateway's metrics and its OpenAPI document are well below 1 MiB."""


class EndlessAnswer(Exception):
    """It was given up."""


def bounded(pieces: Iterable[bytes], *, until_s: float, monotonic_s: Callable[[], float]) -> Iterator[bytes]:
    """Yield the pieces of an answer. Raises EndlessAnswer when they are too many, or still come after `until_s`."""
    size_bytes = 0
    for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > _BYTES_MAX or monotonic_s() > until_s:
            raise EndlessAnswer
        yield piece


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of an answer, each as soon as it is there."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    if rest:
        yield rest
