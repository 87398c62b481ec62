"""Output: tables for people, JSON for programs. Text of servers and models is printed without control characters."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from contextcache.client.failures import ApiError, ClientError
from contextcache.client.types import ContextInfo, KeptInfo, Reply, TurnInfo

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and new line, marks of text direction, and lone surrogates, which no stream takes."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_ROWS_AT_ONCE = 100
_WIDTH_WITHOUT_TERMINAL = 1000
_GAP = 2
"""Spaces between two columns."""
_CUT, _LEAST_WIDTH = frozenset({"model"}), 5
"""Columns that a narrow terminal may cut, and their least width: the beginning of a model's name identifies it."""


def plain(text: object) -> str:
    """Return text without control characters."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text))


def size(size_bytes: float | None) -> str:
    """Return a size for people; `-` if it is unknown."""
    if size_bytes is None:
        return "-"
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def percent(share: float | None) -> str:
    """Return a share in percent; `-` if there is none."""
    return "-" if share is None else f"{100 * share:.0f} %"


def gib_hours(byte_hours: float) -> str:
    """Return storage over time in GiB-hours, to three digits. A small figure is not rounded to zero."""
    hours = byte_hours / (1 << 30)
    return "< 0.001" if 0 < hours < 0.001 else f"{hours:.3g}"


def left(expires_at: float, now: float | None = None) -> str:
    """Return the time until an expiry."""
    seconds = expires_at - (time.time() if now is None else now)
    if seconds <= 0:
        return "over"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def console() -> Console:
    """Return rich's console. It prints colours only on a terminal, and not with NO_COLOR."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)


def print_json(found: Any) -> None:
    """Print one object on one line."""
    sys.stdout.write(json.dumps(found, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(plain(text), file=sys.stderr)  # noqa: T201  # what a command line does


def fault(error: ClientError) -> str:
    """Return an error as one line, with the request id for the server's logs."""
    if not isinstance(error, ApiError):
        return str(error)
    found = filter(None, (error.said_code or str(error.status), error.request_id and f"request {error.request_id}"))
    return f"{error.message} ({', '.join(found)})"


def receipt(reply: Reply) -> str:
    """Return the receipt of an answer as one line."""
    usage = reply.usage.context
    parts = [reply.session_id]
    if reply.generation is not None:
        parts.append(f"generation {reply.generation}")
    parts.append(f"computed {usage.computed_tokens}")
    source = "" if usage.source == "none" else f" from {usage.source}"
    parts.append(f"cached {usage.cached_tokens}{source}")
    parts.append(f"saved {percent(usage.saved_share)}")
    if not usage.committed:
        parts.append(f"not committed ({usage.reason or 'the server stored no context'})")
    if reply.finish_reason == "length":
        parts.append("stopped at --max-tokens")
    return " · ".join(parts)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, shows_heads: bool = True) -> Table:
    """Return a table that fits the terminal: columns are cut or left out."""
    from rich.table import Table
    from rich.text import Text

    cells = [[plain(cell) for cell in row] for row in rows]
    widths = _fitting(heads, cells)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for head, width in widths.items():
        made.add_column(
            head if shows_heads else "", justify="right" if head in _NUMBERS else "left", no_wrap=True, width=width
        )
    for row in cells:
        made.add_row(*(Text(cell) for head, cell in zip(heads, row, strict=True) if head in widths))
    return made


def _fitting(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return the columns that fit the terminal, with their widths.

    Names of models are cut first. Then the columns in `_DROP` go, one by one, except the first column, which identifies
    the row. Other text and figures stay whole.
    """
    from rich.cells import cell_len

    columns = list(zip(heads, *cells, strict=True))
    widths = {str(head): max(map(cell_len, (head, *column))) for head, *column in columns}
    limit, cut = console().width, dict[str, int]()
    for dropped in ("", *(name for name in _DROP if name != heads[0])):
        widths.pop(dropped, None)
        too_wide = max(0, sum(widths.values()) + _GAP * (len(widths) - 1) - limit)
        cut = {head: max(min(widths[head], _LEAST_WIDTH), widths[head] - too_wide) for head in _CUT & widths.keys()}
        if sum(widths[head] - width for head, width in cut.items()) >= too_wide:
            break
    return widths | cut


CONTEXT_HEADS = ("session_id", "model", "turns", "tokens", "saved", "gen", "state", "left", "parent")
USAGE_HEADS = ("day", "key", "contexts", "turns", "computed", "cached", "saved", "answered", "saved s", "GiB·h")
TURN_HEADS = ("gen", "at", "computed", "cached", "saved", "answered", "from", "first s", "took s", "why")
KEPT_HEADS = ("id", "tokens", "size", "pods", "left")
_NUMBERS = frozenset({"turns", "tokens", "gen", "left", "size", *USAGE_HEADS[2:], "first s", "took s"})
_DROP = (
    *("parent", "gen", "state", "contexts", "answered", "GiB·h", "at", "pods", "from", "key", "size", "took s"),
    *("model", "turns", "first s", "saved s", "tokens", "cached", "why", "computed", "saved", "left"),
)
"""Columns that a narrow terminal leaves out, in this order. `--json` has all of them."""


def context_row(info: ContextInfo) -> tuple[object, ...]:
    """Return a context as a row under `CONTEXT_HEADS`."""
    counts = (info.turns, info.tokens, percent(info.saved_share), info.generation)
    return info.session_id, info.model, *counts, info.state, left(info.expires_at), info.parent or ""


def kept_row(info: KeptInfo) -> tuple[object, ...]:
    """Return kept KV as a row under `KEPT_HEADS`."""
    return info.id, info.tokens, size(info.size_bytes), ", ".join(info.pods), left(info.expires_at)


def turn_rows(turns: Iterable[TurnInfo]) -> Iterator[tuple[object, ...]]:
    """Yield receipts of turns as rows under `TURN_HEADS`."""
    for turn in turns:
        tokens = (turn.computed_tokens, turn.cached_tokens, percent(turn.saved_share), turn.completion_tokens)
        first = "-" if turn.first_token_ms is None else f"{turn.first_token_ms / 1000:.2f}"
        why = turn.reason or turn.match or "create"
        yield turn.generation, _clock(turn.at), *tokens, turn.source, first, f"{turn.took_ms / 1000:.2f}", why


def usage_rows(found: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield usage as rows under `USAGE_HEADS`, the sum of each model, and the total."""
    named = [(day["day"], one["key"] or "(stored KV)", one) for day in found["days"] for one in day["keys"]]
    models = [("total", one["model"], one) for one in found.get("models", ())]
    for day, key, one in [*named, *models, ("total", "", found["total"])] if named else ():
        held = sum(one["byte_hours"].values())
        saved = percent(one.get("saved_share"))
        tokens = (one["computed_tokens"], one["cached_tokens"], saved, one["completion_tokens"])
        yield day, key, one["contexts"], one["turns"], *tokens, f"{one['saved_seconds']:.1f}", gib_hours(held)


def print_rows(heads: Sequence[str], rows: Iterator[Sequence[object]]) -> int:
    """Print rows as they arrive, in tables of 100 rows. Return the number of rows."""
    out, number = console(), 0
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        out.print(table(heads, batch, shows_heads=not number))
        number += len(batch)
    return number


def shown(info: ContextInfo) -> dict[str, Any]:
    """Return the fields of a context, for people."""
    said = {name: value for name, value in info.raw.items() if name not in ("object", "recent_turns")}
    said |= {name: _moment(said[name]) for name in ("created", "expires_at")}
    return said | {"bytes": size(info.size_bytes), "left": left(info.expires_at)}


def _moment(unix_s: Any) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).astimezone().isoformat(" ", "seconds")
    except (TypeError, ValueError, OverflowError, OSError):
        return str(unix_s)  # not a time


def _clock(unix_s: Any) -> str:
    """Return a moment in local time, without year and offset: all rows have the same."""
    told = _moment(unix_s)
    return told[5:19] if told[:5].endswith("-") else told


def fields(found: Mapping[str, Any]) -> RenderableType:
    """Return fields as lines of name and value. Empty values are left out."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True, min_width=max(map(len, found), default=0))
    made.add_column(overflow="fold")
    for name, value in found.items():
        if value not in (None, "", {}, []):
            made.add_row(Text(plain(name), style="bold"), Text(plain(_said(value))))
    return made


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_said(one)}" for name, one in value.items() if one not in (None, ""))
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value))
    return str(value)
