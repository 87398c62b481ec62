"""`top` and `watch` on a terminal: what is drawn when looks fail, and what is left when they end."""

from __future__ import annotations

import io
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import httpx
import pytest

from contextcache.cli import live
from contextcache.client import ContextCache, errors
from contextcache.client.retries import Retries
from tests.unit.client.test_client import INFO, KEY, URL, Server, error

BACK = "\x1b[?1049l"
"""What gives the terminal its first screen back."""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Give a terminal to look at, of a hundred columns, while a block runs."""
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def running():
        with redirect_stdout(Terminal()) as terminal, redirect_stderr(terminal):
            yield terminal

    return running


def client_of(*answers):
    http = httpx.Client(transport=httpx.MockTransport(Server(*answers)))
    return ContextCache(URL, KEY, http=http, retries=Retries(times=0))


def test_a_fault_stands_over_what_was_seen_last_until_the_next_look(on_terminal):
    away = (503, error("store_unavailable", "the store is \x1b[31maway"))
    client = client_of((200, INFO), away, (200, INFO), (401, error("invalid_api_key")))

    with on_terminal() as terminal, pytest.raises(errors.InvalidApiKey):
        live.watch(client, "ctx_1", every_s=0, as_json=False)

    first, fault, after = (picture for picture in terminal.getvalue().split("\x1b[H") if "ctx_1" in picture)
    assert ["store_unavailable" in picture for picture in (first, fault, after)] == [False, True, False]
    assert fault.index("store_unavailable") < fault.index("ctx_1")
    assert "is \x1b[31maway" not in fault


def test_that_a_context_is_gone_is_said_when_the_terminal_is_as_it_was(on_terminal):
    client = client_of((200, INFO), (404, error("context_not_found", "no more")))

    with on_terminal() as terminal:
        live.watch(client, "ctx_1", every_s=0, as_json=False)

    assert terminal.getvalue().endswith("ctx_1: no more\n")
    assert BACK in terminal.getvalue().removesuffix("ctx_1: no more\n")


def test_one_look_alone_fails_as_any_command_does():
    with pytest.raises(errors.StoreUnavailable):
        live.top(client_of((503, error("store_unavailable"))), every_s=0, once=True, as_json=True)


def test_one_look_on_a_terminal_stays_there(on_terminal):
    """Seen to fail when `top --once` drew on the second screen: the terminal showed nothing afterwards."""
    usage = {"object": "usage", "days": [], "total": {"turns": 1, "computed_tokens": 5, "cached_tokens": 15}}
    answers = (
        (200, usage | {"contexts_now": 1}),
        (200, {"data": [INFO], "has_more": False}),
        (404, error("not_found")),
    )

    with on_terminal() as terminal:
        live.top(client_of(*answers), every_s=0, once=True, as_json=False)

    assert "1 context · 1 turn · computed 5 · cached 15 (75%)" in terminal.getvalue()
    assert "ctx_1" in terminal.getvalue()
    assert BACK not in terminal.getvalue()
