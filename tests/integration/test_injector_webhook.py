"""The injector over real HTTPS: reviews, garbage, bounds, a certificate that changes, and its drain."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from contextlib import asynccontextmanager

import aiohttp
import pytest
import trustme

from pod_injector import server
from pod_injector.server import Webhook, serve
from pod_injector.settings import InjectorSettings
from tests.kit.certificates import chain_of
from tests.kit.ports import free_port
from tests.kit.until import until
from tests.unit.pod_injector.pods import apply_patch, make_parts, make_pod

HOST = "cc-injector.llm.svc"
PATIENCE_S = 60
"""For what takes milliseconds on a machine that is not busy."""


class Injector:
    """One injector in the test's own loop, with a certificate of `ca`."""

    def __init__(self, directory, ca):
        self.ca = ca
        self.cert_file, self.key_file = directory / "tls.crt", directory / "tls.key"
        self.issue(ca)
        (directory / "parts.json").write_text(make_parts().model_dump_json())
        self.values = {
            "port": 0,
            "metrics_port": 0,
            "cert_file": self.cert_file,
            "key_file": self.key_file,
            "parts_file": directory / "parts.json",
            "drain_delay_s": 0,
            "request_timeout_s": PATIENCE_S,
        }
        self.stop = asyncio.Event()
        self.https = self.probes = None

    def issue(self, ca):
        """Replace the files, as a mounted Secret's are: one after the other."""
        made = ca.issue_cert(HOST)
        made.private_key_pem.write_to_path(str(self.key_file))
        self.cert_file.write_bytes(chain_of(made))

    @asynccontextmanager
    async def running(self, *, handshake_timeout_s=PATIENCE_S, **changes):
        """Serve until the end of the block."""
        started = asyncio.get_running_loop().create_future()
        settings = InjectorSettings(**self.values | changes)
        serving = serve(
            settings,
            self.stop,
            on_started=lambda *ports: started.set_result(ports),
            handshake_timeout_s=handshake_timeout_s,
        )
        task = asyncio.create_task(serving)
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        self.https, self.probes = started.result()
        try:
            yield self
        finally:
            self.stop.set()
            if settings.drain_delay_s:  # nobody waits for its end
                task.cancel()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((task,))
            assert task.cancelled() or task.exception() is None

    def trust(self, ca=None):
        """Return a client's context that believes one CA, as the API server does by caBundle."""
        context = ssl.create_default_context()
        (ca or self.ca).configure_trust(context)
        return context

    async def post(self, body, *, path="/mutate", ca=None, **changes):
        """Send what the API server would; return status and JSON."""
        # A connection of its own: each request is a new handshake.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
            url = f"https://127.0.0.1:{self.https}{path}"
            options = {"ssl": self.trust(ca), "server_hostname": HOST, "data": body} | changes
            async with http.request(options.pop("method", "POST"), url, **options) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if text.startswith("{") else text


@pytest.fixture
def injector(tmp_path):
    return Injector(tmp_path, trustme.CA())


def make_review(pod):
    request = {
        "namespace": "llm",
        "uid": "u-1",
        "kind": {"version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "object": pod,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})


async def test_a_review_over_https_injects_the_pod(injector):
    pod = make_pod()
    async with injector.running():
        status, answer = await injector.post(make_review(pod))

    response = answer["response"]
    assert (status, response["uid"], response["allowed"]) == (200, "u-1", True)
    patched = apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    assert [container["name"] for container in patched["spec"]["initContainers"]] == [
        "context-cache-payload",
        "kv-sidecar",
    ]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\x00", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b"[" * 100_000, 400),
        (json.dumps({"kind": "AdmissionReview", "request": {"uid": "u"}}).encode(), 400),
        (b" " * (257 << 10), 413),
    ],
    ids=["empty", "no text", "a list", "no review", "deep", "no pod", "large"],
)
async def test_what_is_no_review_gets_an_error_and_the_next_review_an_answer(injector, body, status):
    async with injector.running(max_body_bytes=256 << 10):
        refused = await injector.post(body)
        served = await injector.post(make_review(make_pod()))

    assert (refused[0], served[0]) == (status, 200)


async def test_other_paths_and_methods_are_not_served(injector):
    async with injector.running():
        statuses = [
            (await injector.post(b"{}", path="/"))[0],
            (await injector.post(b"{}", path="/metrics", method="GET"))[0],
            (await injector.post(None, method="GET"))[0],
        ]

    assert statuses == [404, 404, 405]


async def test_a_body_that_does_not_arrive_ends_at_its_deadline(injector):
    async def trickle():
        yield b"{"
        await asyncio.Event().wait()

    async with injector.running(request_timeout_s=0.2):
        status, _ = await injector.post(trickle())

    assert status == 408


@pytest.fixture
def begun(monkeypatch):
    """Set once a review's head has come."""
    found, mutate = asyncio.Event(), Webhook.mutate

    async def noted(webhook, request):
        found.set()
        return await mutate(webhook, request)

    monkeypatch.setattr(Webhook, "mutate", noted)
    return found


async def test_more_reviews_than_are_served_at_one_time_are_refused_and_pods_start_without(injector, begun):
    held = asyncio.Event()

    async def slow():
        yield b"{"
        await held.wait()
        yield b"}"

    async with injector.running(max_requests=1):
        first = asyncio.create_task(injector.post(slow()))
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        refused, _ = await injector.post(make_review(make_pod()))
        held.set()
        first_status, _ = await first
        served = (await injector.post(make_review(make_pod())))[0]

    assert (refused, first_status, served) == (503, 400, 200)


async def test_a_connection_that_shakes_no_hands_does_not_stay(injector):
    async with injector.running(handshake_timeout_s=0.2):
        reader, writer = await asyncio.open_connection("127.0.0.1", injector.https)
        async with asyncio.timeout(PATIENCE_S):
            said = await reader.read()
        writer.close()

    assert said == b""


async def test_handshakes_that_nobody_finishes_keep_no_review_out_and_are_bounded(injector):
    async with injector.running(max_connections=4):
        held = [await asyncio.open_connection("127.0.0.1", injector.https) for _ in range(300)]
        status, _ = await injector.post(make_review(make_pod()))
        async with asyncio.timeout(PATIENCE_S):
            # All but the newest: the review took the place of one of them.
            given_up = await asyncio.gather(*(reader.read() for reader, _ in held[:-4]), return_exceptions=True)
        for _, writer in held:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in held), return_exceptions=True)

    assert status == 200
    assert all(not found or isinstance(found, ConnectionError) for found in given_up)


async def test_idle_connections_give_way(injector):
    async with injector.running(max_connections=2):
        port, shown = injector.https, {"ssl": injector.trust(), "server_hostname": HOST}
        held = [await asyncio.open_connection("127.0.0.1", port, **shown) for _ in range(2)]
        statuses = [(await injector.post(make_review(make_pod())))[0] for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(held[0][0].read(), return_exceptions=True)
        for _, writer in held:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in held), return_exceptions=True)

    assert statuses == [200] * 4


async def test_a_review_under_way_keeps_its_connection(injector, begun):
    more = asyncio.Event()

    async def slow():
        yield b"{"
        await more.wait()
        yield b"}"

    async with injector.running(max_connections=2):
        first = asyncio.create_task(injector.post(slow()))
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        others = [(await injector.post(make_review(make_pod())))[0] for _ in range(4)]
        more.set()
        first_status, _ = await first

    assert (first_status, others) == (400, [200] * 4)


async def test_a_new_certificate_is_shown_without_a_restart(injector):
    other = trustme.CA()
    async with injector.running():
        injector.issue(other)
        status, _ = await until(
            lambda: injector.post(make_review(make_pod()), ca=other),
            what="an answer with the new certificate",
            despite=(aiohttp.ClientConnectorCertificateError,),
        )
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await injector.post(make_review(make_pod()))

    assert status == 200


async def test_probes_and_metrics_are_on_a_port_of_their_own(injector):
    async with injector.running(metrics_port=free_port(), drain_delay_s=PATIENCE_S):
        await injector.post(make_review(make_pod()))
        await injector.post(b"x")
        ready, _ = await plain(injector, "/readyz")
        _, metrics = await plain(injector, "/metrics")
        injector.stop.set()
        draining, _ = await until(
            lambda: plain(injector, "/readyz"), is_so=lambda answer: answer[0] != 200, what="it drains"
        )

    assert (ready, draining) == (200, 503)
    assert 'contextcache_injector_reviews_total{outcome="injected"} 1.0' in metrics
    assert 'contextcache_injector_refused_requests_total{status="400"} 1.0' in metrics
    assert "contextcache_injector_certificate_expiry_timestamp_seconds" in metrics


async def test_probes_are_answered_while_a_review_takes_long(injector, monkeypatch):
    release, judge = threading.Event(), server.review

    def slow(*arguments):
        assert release.wait(PATIENCE_S)
        return judge(*arguments)

    monkeypatch.setattr(server, "review", slow)
    async with injector.running(metrics_port=free_port()):
        reviewed = asyncio.create_task(injector.post(make_review(make_pod())))
        healthy = [(await plain(injector, "/healthz"))[0] for _ in range(3)]
        release.set()
        status, _ = await reviewed

    assert (healthy, status) == ([200] * 3, 200)


async def plain(injector, path):
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{injector.probes}{path}") as answer,
    ):
        return answer.status, await answer.text()


async def test_what_is_missing_at_the_start_is_said(injector):
    injector.key_file.write_text("not a key")
    with pytest.raises(OSError, match=r"PEM|pem|no start line"):
        async with injector.running():
            pass


async def test_parts_that_are_none_are_said_with_their_fault(injector):
    injector.values["parts_file"].write_text('{"version": "1", "extra": 1}')
    with pytest.raises(ValueError, match="sidecar: Field required"):
        async with injector.running():
            pass
