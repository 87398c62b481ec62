"""`watch` and `top`: look again and again, until Ctrl-C. On a terminal one picture that changes, else one a look."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from contextcache.cli import output
from contextcache.client import ContextCache
from contextcache.client.errors import (
    ApiError,
    ConnectionFailed,
    ContextExpired,
    ContextNotFound,
    NotFound,
    OperatorOnly,
)
from contextcache.client.retries import Retries

if TYPE_CHECKING:
    from rich.console import RenderableType

    _Draw = Callable[[RenderableType], None]

LOOKS: Mapping[str, Any] = {"timeout_s": 10.0, "retries": Retries(times=0)}
"""Of a client that follows: a fault is told when it is there, and the next look is the repeat."""
_COUNTED_MAX = 1000
"""Contexts that `top` counts without the server's own figures; more are `1000+`."""
_NEWEST = 10
_PODS_SHOWN, _TENANTS_SHOWN = 20, 10
_POD_HEADS = ("pod", "state", "models", "running", "waiting", "KV used", "tiers taken")
_TENANT_HEADS = ("tenant", "contexts", "turns today", "per min", "computed", "cached", "GiB·h")
_NUMBERS = frozenset({"running", "waiting", "KV used", "turns", "tokens", "left", *_TENANT_HEADS[1:]})
_DROP = ("models", "waiting", "contexts", "GiB·h", "per min", "state")
"""Columns that a narrow terminal leaves out, the first one first."""


def watch(client: ContextCache, session_id: str, *, every_s: float, as_json: bool) -> None:
    """Follow one context until it is gone."""
    last: Mapping[str, Any] = {}

    def look(draw: _Draw) -> bool:
        nonlocal last
        info = client.contexts.get(session_id).info
        assert info is not None, "it was read"
        if not as_json:
            draw(output.fields(output.shown(info)))
        elif info.raw != last:
            output.print_json(dict(info.raw))
        last = info.raw
        return True

    try:
        _follow(look, every_s=every_s, as_json=as_json)
    except (ContextNotFound, ContextExpired) as gone:
        output.say(f"{session_id}: {gone.message}")


def top(client: ContextCache, *, every_s: float, once: bool, as_json: bool) -> None:
    """Follow the tenant: contexts, what was computed and saved; with an operator's key, pods and tenants too."""
    before: dict[str, Any] | None = None

    def look(draw: _Draw) -> bool:
        nonlocal before
        seen = _look(client)
        if as_json:
            output.print_json(seen)
        else:
            draw(_drawn(seen, before))
        before = seen
        return not once

    _follow(look, every_s=every_s, as_json=as_json, once=once)


def _follow(look: Callable[[_Draw], bool], *, every_s: float, as_json: bool, once: bool = False) -> None:
    """Look until there is nothing more to see; of a fault that may pass one is told, and the next look comes.

    Raises ClientError for another, and for any where one looks once.
    """
    with _picture(as_lines=as_json or once) as (draw, tell):
        while True:
            try:
                if not look(draw):
                    return
            except (ApiError, ConnectionFailed) as fault:
                if once or not _may_pass(fault):
                    raise
                tell(f"{time.strftime('%X')} {output.fault(fault)}")
            time.sleep(every_s)


def _may_pass(fault: ApiError | ConnectionFailed) -> bool:
    return not isinstance(fault, ApiError) or fault.status >= 500 or fault.status == 429


@contextmanager
def _picture(*, as_lines: bool) -> Iterator[tuple[_Draw, Callable[[str], None]]]:
    """Give what draws, and what tells of a fault; the terminal is as it was when the block ends, however it does."""
    console = output.console()
    if as_lines or not sys.stdout.isatty():
        yield console.print, output.say
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    drawn: RenderableType = Text()

    def draw(picture: RenderableType) -> None:
        nonlocal drawn
        drawn = picture
        live.update(picture, refresh=True)

    def tell(fault: str) -> None:
        live.update(Group(Text(output.plain(fault), style="red"), Text(), drawn), refresh=True)

    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield draw, tell


def _look(client: ContextCache) -> dict[str, Any]:
    seen: dict[str, Any] = {"at": round(time.time(), 3)}
    try:
        seen["usage"] = client.usage()
    except NotFound:
        seen["usage"] = None  # an older server
    listed = list(islice(client.contexts.list(), _COUNTED_MAX if seen["usage"] is None else _NEWEST))
    seen["contexts"] = len(listed) if seen["usage"] is None else None
    seen["newest"] = [dict(info.raw) for info in listed[:_NEWEST]]
    seen["pods"], seen["tenants"] = (), {}
    with suppress(OperatorOnly, NotFound):
        deployment = client.deployment(limit=_TENANTS_SHOWN)
        seen["pods"] = deployment["pods"]
        names = [one["tenant"] for one in deployment["tenants"]]
        seen["tenants"] = {name: client.usage(tenant=name) for name in names}
    return seen


def _drawn(seen: Mapping[str, Any], before: Mapping[str, Any] | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(output.plain(_headline(seen)), style="bold")]
    if seen["pods"]:
        parts += [Text(), _table(_POD_HEADS, map(_pod_row, seen["pods"][:_PODS_SHOWN]))]
    if seen["tenants"]:
        parts += [Text(), _table(_TENANT_HEADS, _tenant_rows(seen, before))]
    newest = [
        (one["session_id"], one["model"], one["turns"], one["tokens"], one["state"], output.left(one["expires_at"]))
        for one in seen["newest"]
    ]
    parts += [Text(), _table(("newest", "model", "turns", "tokens", "state", "left"), newest)]
    return Group(*parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> RenderableType:
    return output.table(heads, rows, right=_NUMBERS, drop=_DROP)


def _headline(seen: Mapping[str, Any]) -> str:
    usage = seen["usage"]
    if usage is None:
        number = seen["contexts"]
        return f"{number}+ contexts" if number == _COUNTED_MAX else _counted(number, "context")
    total = usage["total"]
    asked = total["computed_tokens"] + total["cached_tokens"]
    share = f"{total['cached_tokens'] / asked:.0%}" if asked else "-"
    tiers = ", ".join(f"{tier} {output.size(used)}" for tier, used in usage.get("bytes_now", {}).items())
    return (
        f"{_counted(usage.get('contexts_now', '-'), 'context')} · {_counted(total['turns'], 'turn')} · "
        f"computed {total['computed_tokens']:,} · cached {total['cached_tokens']:,} ({share})"
        + (f" · {tiers}" if tiers else "")
    )


def _counted(number: object, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _pod_row(pod: Mapping[str, Any]) -> tuple[object, ...]:
    engine = pod["engine"]
    tiers = ", ".join(f"{tier} {share:.0%}" for tier, share in pod["tiers"].items())
    load = (engine["running"], engine["waiting"], f"{engine['kv_usage']:.0%}")
    return pod["name"], pod["state"], ", ".join(pod["models"]), *load, tiers


def _tenant_rows(seen: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[tuple[object, ...]]:
    for tenant, usage in seen["tenants"].items():
        total, then = usage["total"], None if before is None else before["tenants"].get(tenant)
        rate = "-"
        if before is not None and then is not None:
            # Midnight begins a new sum.
            turns = max(0, total["turns"] - then["total"]["turns"])
            rate = f"{60 * turns / max(0.001, seen['at'] - before['at']):.0f}"
        held = output.gib_hours(sum(total["byte_hours"].values()))
        tokens = f"{total['computed_tokens']:,}", f"{total['cached_tokens']:,}"
        yield tenant, usage["contexts_now"], total["turns"], rate, *tokens, held
