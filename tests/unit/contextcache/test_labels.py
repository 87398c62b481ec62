"""A label names a context where it equals one's name, and never costs a plain request its answer (ADR 0094)."""

import asyncio

import pytest

from contextcache import responses
from contextcache.claim import RESPONSES_PATH, label_of, read_strict_claims
from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, ContextExpired, ContextNotFound, StoreUnavailable
from contextcache.responses import PAUSE_MS, Continued, Labels

CHAT = "/v1/chat/completions"


class Store:
    """Contexts by tenant and name; `fault` is raised in their place."""

    def __init__(self):
        self.contexts = {("demo", "chat-42")}
        self.fault = None
        self.looks = 0

    async def locate(self, tenant, session_id):
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        if (tenant, session_id) not in self.contexts:
            raise ContextNotFound("no context has this session_id")
        return session_id


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def ask(store, clock):
    found = Labels(store.locate, clock)

    async def asked(header, *, tenant="demo", path=CHAT, body=b'{"model": "m"}'):
        claims = None if body is None else read_strict_claims(body)
        return await found.continued_by(tenant, path, claims, header)

    return asked


async def test_a_label_that_equals_a_context_names_it(ask):
    """Seen to fail: None, and the request ran without its context."""
    assert await ask("chat-42") == Continued("chat-42")
    assert await ask("chat-42, chat-42 ") == Continued("chat-42")


async def test_a_label_that_equals_another_tenants_context_is_as_one_that_equals_none(ask):
    assert await ask("chat-42", tenant="other") is None
    assert await ask("chat-43") is None


@pytest.mark.parametrize(
    "header", [None, "", "my agent's run/7", "a, b", "kept_x", "x" * 129, "/", "ctx_1, ctx_1", ",", "é"]
)
async def test_what_cannot_be_a_name_costs_no_look_up(ask, store, header):
    await ask(header)

    assert store.looks == 0


async def test_a_body_that_names_a_context_or_was_not_read_leaves_the_label_a_label(ask, store):
    assert await ask("chat-42", body=b'{"session_id": "other"}') == Continued("other")
    assert await ask("chat-42", body=None) is None
    assert store.looks == 0


async def test_a_response_goes_on_in_the_labelled_context(ask):
    assert await ask("chat-42", path=RESPONSES_PATH, body=b'{"store": true}') == Continued("chat-42")
    assert await ask("chat-42", path=RESPONSES_PATH, body=b'{"store": false}') == Continued("chat-42", commits=False)
    assert await ask("chat-43", path=RESPONSES_PATH, body=b'{"store": true}') == Continued(None, creates=True)


async def test_an_expired_context_is_named_so_that_its_client_is_told(ask, store):
    store.fault = ContextExpired("the context has expired")

    assert await ask("chat-42") == Continued("chat-42")


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), TimeoutError()])
async def test_a_store_that_is_away_costs_one_look_up_in_a_while_and_no_request(ask, store, clock, fault):
    store.fault = fault
    assert [await ask("chat-42") for _ in range(3)] == [None] * 3
    assert store.looks == 1

    store.fault = None
    clock.advance(ms=PAUSE_MS)
    assert await ask("chat-42") == Continued("chat-42")


async def test_a_context_that_cannot_be_read_hides_no_other(ask, store):
    """A tenant with a damaged row must not take the labels of all others away."""
    store.fault = ContextCacheError("the row cannot be read")
    assert await ask("chat-42") is None

    store.fault = None
    assert await ask("chat-42") == Continued("chat-42")


async def test_a_clock_that_is_set_back_ends_the_pause(ask, store, clock):
    store.fault = StoreUnavailable("away")
    await ask("chat-42")
    store.fault = None
    clock.advance(ms=-3_600_000)

    assert await ask("chat-42") == Continued("chat-42")


async def test_a_store_that_hangs_is_waited_for_no_longer_than_a_plain_request_may(clock, monkeypatch):
    monkeypatch.setattr(responses, "LOOK_UP_S", 0)
    found = Labels(lambda tenant, session_id: asyncio.Event().wait(), clock)
    claims = read_strict_claims(b"{}")

    assert await found.continued_by("demo", CHAT, claims, "chat-42") is None


def test_a_label_is_read_as_the_header_is():
    assert [label_of(header) for header in ("a", " a\t", "a,a", "a.b-c_d", "ctx_1")] == ["a", "a", "a", "a.b-c_d", None]
