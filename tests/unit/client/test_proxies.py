"""Proxies of the environment: never for loopback, named in errors without their password, and never a traceback."""

import asyncio
import os
from itertools import product

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.cli.app import MISUSED, run
from contextcache.client import AsyncContextCache, ContextCache
from contextcache.client.proxies import proxy_of
from contextcache.doctor.front import Front, Unreachable

KEY = "test-key-1234567890"
PASSWORD = "hunter2"
DEAD = "127.0.0.1:9"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
LOOPBACK = ("127.0.0.1", "127.8.8.8", "[::1]", "localhost", "LOCALHOST.", "api.localhost", "[::ffff:127.0.0.1]")
PROXIES = (
    f"http://{DEAD}",
    f"user:{PASSWORD}@{DEAD}",
    f"socks5://user:{PASSWORD}@{DEAD}",
    "socks://x",
    "fd00::/8",
    ":",
)
EXCLUDED = (
    "",
    "fd00::/8",
    "[::1]",
    "fd00::/8,[::1],10.0.0.0/8",
    "::1/128, *.corp,http://[::1]:80",
    "[",
    "[::",
    "a:b:c",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No proxy but those that a test sets."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("REQUEST_METHOD", raising=False)
    return monkeypatch


def set_all(environment, proxy, no_proxy, *, upper):
    for name in NAMES:
        environment.setenv(name.upper() if upper else name, no_proxy if name == "no_proxy" else proxy)


@pytest.mark.parametrize("proxy", PROXIES)
def test_loopback_never_uses_a_proxy(environment, proxy):
    """Seen to fail: ImportError for socks5, InvalidURL for `fd00::/8` and `[::1]`."""
    for no_proxy, upper in product(EXCLUDED, (True, False)):
        with environment.context() as only:
            set_all(only, proxy, no_proxy, upper=upper)
            for host, scheme in product(LOOPBACK, ("http", "https")):
                assert proxy_of(f"{scheme}://{host}:8000") is None, (host, scheme, no_proxy, upper)


def test_a_client_of_either_kind_is_made_for_loopback(environment):
    set_all(environment, f"socks5://{DEAD}", "fd00::/8,[::1]", upper=True)
    ContextCache("http://[::1]:8000", KEY).close()
    asyncio.run(AsyncContextCache("http://localhost:8000", KEY).close())


@pytest.mark.parametrize(
    ("url", "variables", "variable"),
    [
        ("https://h.example", {"HTTPS_PROXY": "p:1", "ALL_PROXY": "q:1"}, "HTTPS_PROXY"),
        ("https://h.example", {"HTTP_PROXY": "p:1"}, None),
        ("http://h.example", {"HTTPS_PROXY": "p:1"}, None),
        ("https://h.example", {"HTTP_PROXY": "p:1", "all_proxy": "q:1"}, "all_proxy"),
        ("https://h.example", {"HTTPS_PROXY": "p:1", "https_proxy": "q:1"}, "https_proxy"),
        ("http://h.example", {"HTTP_PROXY": ""}, None),
        ("http://h.example", {"ALL_PROXY": "p:1", "NO_PROXY": "*"}, None),
        ("http://a.h.example", {"ALL_PROXY": "p:1", "NO_PROXY": "h.example"}, None),
        ("http://a.h.example", {"ALL_PROXY": "p:1", "no_proxy": "x, .h.example"}, None),
        ("http://ah.example", {"ALL_PROXY": "p:1", "NO_PROXY": "h.example"}, "ALL_PROXY"),
        ("http://h.example:81", {"ALL_PROXY": "p:1", "NO_PROXY": "h.example:81"}, None),
        ("http://h.example", {"ALL_PROXY": "p:1", "NO_PROXY": "h.example:81"}, "ALL_PROXY"),
        ("http://10.1.2.3", {"ALL_PROXY": "p:1", "NO_PROXY": "10.0.0.0/8"}, None),
        ("http://10.1.2.3", {"ALL_PROXY": "p:1", "NO_PROXY": "10.0.0.0/8x"}, "ALL_PROXY"),
        ("http://[fd00::1]:8000", {"ALL_PROXY": "p:1", "NO_PROXY": "fd00::/8"}, None),
        ("http://[fd00::1]:8000", {"ALL_PROXY": "p:1", "NO_PROXY": "[fd00::1]:8000"}, None),
        ("http://[fe00::1]:8000", {"ALL_PROXY": "p:1", "NO_PROXY": "fd00::/8"}, "ALL_PROXY"),
    ],
)
def test_which_proxy_it_is(environment, url, variables, variable):
    for name, value in variables.items():
        environment.setenv(name, value)
    found = proxy_of(url)

    assert (None if found is None else found.variable) == variable


UNUSABLE = [
    (f"socks5://user:{PASSWORD}@{DEAD}", f"socks5://{DEAD}", "pip install 'httpx[socks]'"),
    (f"socks://user:{PASSWORD}@{DEAD}/", f"socks://{DEAD}", "allowed: http://HOST:PORT, https://HOST:PORT, socks5://"),
    (f"socks4://{DEAD}", f"socks4://{DEAD}", "allowed: http://"),
    (f"http://user:{PASSWORD}@h:99999", "http://h:99999", "allowed: http://"),
    (f"http://user:{PASSWORD}@[::1", "http://[::1", "allowed: http://"),
    (f"user:{PASSWORD}@:80", "http://:80", "allowed: http://"),
    (f"user:{PASSWORD}/x@h:80", "http://h:80", ""),
]


@pytest.mark.parametrize(("value", "shown", "cure"), UNUSABLE)
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY", "https_proxy", "all_proxy"])
def test_a_proxy_that_cannot_be_used_is_named_in_one_line_without_its_password(
    environment, capsys, name, value, shown, cure
):
    environment.setenv(name, value)
    try:
        proxy_of("https://llm.example.org")
    except ValueError as exc:
        told = str(exc)
        assert f"{name} names the proxy {shown}" in told
        assert "set NO_PROXY=llm.example.org" in told
        assert cure in told
        assert (PASSWORD in told, "\n" in told) == (False, False)
    else:
        pytest.fail("it was taken")
    environment.setenv("CONTEXT_CACHE_URL", "https://llm.example.org")
    environment.setenv("CONTEXT_CACHE_API_KEY", KEY)
    assert run(["models"]) == MISUSED
    assert capsys.readouterr().err == f"{told}\n"


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_value_of_a_variable_is_worse_than_a_sentence(value, no_proxy):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ALL_PROXY", value.replace("\0", "").encode("utf-8", "replace").decode())
        environment.setenv("NO_PROXY", no_proxy.replace("\0", "").encode("utf-8", "replace").decode())
        try:
            told = str(proxy_of("http://llm.example.org"))
        except ValueError as exc:
            told = str(exc)

    assert told == "None" or "ALL_PROXY" in told


def test_a_client_of_the_callers_keeps_its_own_way(environment):
    environment.setenv("ALL_PROXY", f"socks5://{DEAD}")
    http = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []})))
    with ContextCache("https://llm.example.org", KEY, http=http) as client:
        assert client.models() == []


def test_an_openai_client_of_a_context_takes_the_same_way(environment):
    """Seen to fail: ImportError for socks5, InvalidURL for `fd00::/8`, for a server on loopback."""
    set_all(environment, f"socks5://{DEAD}", "fd00::/8", upper=True)
    client = ContextCache("http://127.0.0.1:1", KEY)
    from contextcache.client._sync.contexts import Context

    with Context(client, "ctx_1", "m").openai() as api:
        assert str(api.base_url) == "http://127.0.0.1:1/v1/"


@pytest.mark.parametrize("url", ["http://::1:8000", "http://[::1:8000", "http://h:port"])
def test_a_url_that_is_none_is_said_to_be_one(url):
    """Seen to fail: httpx.InvalidURL, which is no ValueError."""
    with pytest.raises(ValueError, match=r"write an IPv6 address in brackets: http://\[::1\]:8000"):
        ContextCache(url, KEY)


def test_the_doctor_says_that_it_uses_no_proxy(environment):
    environment.setenv("HTTP_PROXY", f"http://user:{PASSWORD}@{DEAD}")
    refused = httpx.MockTransport(lambda request: (_ for _ in ()).throw(httpx.ConnectError("refused")))
    front = Front("http://192.0.2.1:1", key=None, timeout_s=1, transport=refused)
    with pytest.raises(Unreachable) as caught:
        front.call("GET", "/healthz")
    front.close()

    assert f"HTTP_PROXY names the proxy http://{DEAD}, which the doctor does not use" in caught.value.hint
    assert PASSWORD not in caught.value.hint
