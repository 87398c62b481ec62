"""Arguments whose values the shell completes. Completion asks the server, and offers nothing without an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated

import typer

from contextcache.cli.options import key_in
from contextcache.cli.output import plain
from contextcache.cli.place import find_place
from contextcache.client import ContextCache
from contextcache.client.failures import ClientError
from contextcache.client.retries import Retries

_TIMEOUT_S = 2.0
"""Longest silence of the server. A key press must not wait for the timeout of a command."""
_CONTEXTS_MAX = 100
"""The newest contexts: one page of the list."""


def ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return the newest contexts whose id begins with `incomplete`."""
    return _begun(
        incomplete,
        context,
        lambda client: (info.session_id for info in islice(client.contexts.list(), _CONTEXTS_MAX)),
    )


def models(context: typer.Context, incomplete: str) -> list[str]:
    """Return the served models whose name begins with `incomplete`."""
    return _begun(incomplete, context, ContextCache.models)


def _begun(incomplete: str, context: typer.Context, names_of: Callable[[ContextCache], Iterable[str]]) -> list[str]:
    # Before a command runs, only the parser has seen the options of the program.
    options = context.find_root().params
    key_file = options.get("api_key_file")
    try:
        url, key = find_place(options.get("url"), key_in(key_file) if key_file else None)
        with ContextCache(url, key, timeout_s=_TIMEOUT_S, retries=Retries(times=0)) as client:
            return [plain(name) for name in names_of(client) if name.startswith(incomplete)]
    except (ClientError, OSError, ValueError, typer.BadParameter):
        return []  # an error message would land in the words of the command line


Id = Annotated[
    str, typer.Argument(metavar="ID", help="session_id of a context.", show_default=False, autocompletion=ids)
]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="session_ids", show_default=False, autocompletion=ids)]
Model = Annotated[
    str, typer.Argument(help="Name of a model, as `context-cache models` lists it.", autocompletion=models)
]
