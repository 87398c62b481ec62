"""Options and arguments that several commands share, and their parsers."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

Option = partial(typer.Option, show_default=False)
"""An option whose help describes its default in words, or has none to describe."""
_SECONDS_OF = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> int:
    """Parse a duration: 3600, 90s, 30m, 1h, 7d. Raises BadParameter."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a duration; examples: 3600, 90s, 30m, 1h, 7d")
    return int(found[1]) * _SECONDS_OF[found[2]]


def pair(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE. Raises BadParameter."""
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} must be KEY=VALUE", param_hint="--metadata")
    return key, value


def front_url(text: str) -> str:
    """Check a URL that the report prints. Raises BadParameter."""
    if not text.startswith(("http://", "https://")):
        raise typer.BadParameter("must begin with http:// or https://")
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise typer.BadParameter("must not contain a user or password; pass API keys with --api-key-file")
    return text


def key_in(file: Path) -> str:
    """Read an API key from a file. Raises BadParameter."""
    try:
        key = file.read_text().strip()
    except OSError as exc:
        raise typer.BadParameter(f"{file}: {exc.strerror}", param_hint="--api-key-file") from exc
    if not key:
        raise typer.BadParameter(f"{file} is empty", param_hint="--api-key-file")  # a stored key must not replace it
    return key


Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
MaxTokens = Annotated[int | None, Option(help="Maximum length of the answer in tokens.")]
Temperature = Annotated[float | None, Option(help="Sampling temperature. 0: always the likeliest token.")]
Ttl = Annotated[
    int | None, Option(parser=seconds, metavar="TIME", help="Life of the context: seconds, 90s, 30m, 1h or 7d.")
]
