"""Proxies of the environment, on real sockets: loopback is reached past dead ones, other servers through live ones."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import pytest

from contextcache.cli.app import OK, UNREACHABLE, run
from contextcache.client import ConnectionFailed, ContextCache
from contextcache.client.errors import ApiError
from contextcache.client.retries import Retries
from contextcache.doctor.front import Front
from tests.unit.client.test_proxies import DEAD, EXCLUDED, KEY, PASSWORD, PROXIES, environment, set_all

__all__ = ["environment"]


class _Server(ThreadingHTTPServer):
    """Serves models, as a server or as a proxy does; `asked` is what stood in the request line."""

    def __init__(self, host, family, *, status=200):
        self.address_family, self.asked, self.status = family, [], status
        super().__init__((host, 0), _Answer)
        host = f"[{host}]" if family is socket.AF_INET6 else host
        self.address = f"{host}:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        body = json.dumps({"data": [{"id": "m"}]}).encode() if self.server.status == 200 else b"<html>denied"
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    opened = []

    def served(host="127.0.0.1", family=socket.AF_INET, **more):
        server = _Server(host, family, **more)
        opened.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield served
    for server in opened:
        server.shutdown()
        server.server_close()


def exit_of(command):
    try:
        return run([command])
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("upper", [True, False])
def test_client_command_line_and_doctor_reach_loopback_past_dead_proxies(environment, serve, capsys, host, upper):
    """Seen to fail: tracebacks of httpx."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = serve("::1", socket.AF_INET6) if host == "::1" else serve()
    url = f"http://{server.address}" if host != "localhost" else f"http://localhost:{server.server_address[1]}"
    for proxy, no_proxy in product(PROXIES, EXCLUDED[:3]):
        set_all(environment, proxy, no_proxy, upper=upper)
        with ContextCache(url, KEY) as client:
            assert client.models() == ["m"]
    environment.setenv("CONTEXT_CACHE_URL", url)
    environment.setenv("CONTEXT_CACHE_API_KEY", KEY)
    assert exit_of("models") == OK
    front = Front(url, key=None, timeout_s=5)
    assert front.call("GET", "/v1/models").status == 200
    front.close()

    assert capsys.readouterr().out == "m\n"
    assert set(server.asked) == {"/v1/models"}


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"])
def test_a_server_elsewhere_is_asked_through_the_proxy(environment, serve, name):
    proxy = serve()
    environment.setenv(name, f"http://user:{PASSWORD}@{proxy.address}")
    with ContextCache("http://llm.example.org", KEY) as client:
        assert client.models() == ["m"]

    assert proxy.asked == ["http://llm.example.org/v1/models"]


def test_an_error_on_the_way_names_the_proxy(environment, serve, capsys):
    environment.setenv("HTTP_PROXY", f"http://user:{PASSWORD}@{DEAD}")
    told = f"(through proxy http://{DEAD} from HTTP_PROXY; to bypass it, set NO_PROXY=llm.example.org)"
    client = ContextCache("http://llm.example.org", KEY, retries=Retries(times=0))
    with client, pytest.raises(ConnectionFailed) as dead:
        client.models()
    assert str(dead.value).endswith(told)

    environment.setenv("HTTP_PROXY", f"http://user:{PASSWORD}@{serve(status=403).address}")
    with ContextCache("http://llm.example.org", KEY) as client, pytest.raises(ApiError) as denied:
        client.models()
    assert "from HTTP_PROXY" in denied.value.message
    assert PASSWORD not in f"{dead.value!r} {denied.value!r} {denied.value.message}"


def test_the_command_line_ends_in_one_line_where_the_proxy_is_dead(environment, capsys, monkeypatch):
    monkeypatch.setattr("contextcache.client._sync.transport.time.sleep", lambda seconds: None)
    environment.setenv("HTTP_PROXY", f"http://{DEAD}")
    environment.setenv("CONTEXT_CACHE_URL", "http://llm.example.org")
    environment.setenv("CONTEXT_CACHE_API_KEY", KEY)

    assert exit_of("models") == UNREACHABLE
    said = capsys.readouterr().err
    assert (said.count("\n"), "from HTTP_PROXY" in said) == (1, True)
