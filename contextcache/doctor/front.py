"""The deployment as a client sees it: one HTTP client, whose errors are words. The only importer of httpx.

Nothing here raises for a status: what a status means is the checks' business.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from contextcache.client.proxies import proxy_of
from contextcache.doctor.bounded_answer import EndlessAnswer, bounded, lines_of

_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key, which no report, log line or traceback shows."""

    value: str = field(repr=False)


class Unreachable(Exception):
    """No answer came. `hint` says what to look at."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    text: str
    took_ms: float
    body: Any = None
    """The parsed JSON, None when it is none."""

    @property
    def code(self) -> str:
        """`error.code` of our errors, else empty."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("code", "")) if isinstance(error, dict) else ""

    def describe(self) -> str:
        """Return status and message of an error, short."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        message = error.get("message", "") if isinstance(error, dict) else ""
        return " ".join(filter(None, (str(self.status), self.code, str(message)[:_ERROR_CHARS])))


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed answer, by when its events came."""

    answer: Answer
    arrivals_s: list[float] = field(default_factory=list)
    """Seconds from the request to each event."""
    is_complete: bool = False
    """Whether `[DONE]` came."""


class Front:
    """One URL, with or without a key."""

    def __init__(  # what differs between deployments, by name
        self,
        url: str,
        *,
        key: ApiKey | None,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        transport: httpx.BaseTransport | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server_name`: what the certificate is for when it is not the URL's host."""
        self.url = httpx.URL(url.rstrip("/"))
        self.key = key
        self._monotonic_s = monotonic_s
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        # Proxies of the environment are for other places; a deployment is asked directly.
        self._client = httpx.Client(
            base_url=self.url, timeout=timeout_s, verify=tls or True, transport=transport, trust_env=False
        )
        self.timeout_s = timeout_s

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: ApiKey | None = None,
        with_key: bool = True,
    ) -> Answer:
        """Return the answer to one request. `key` is sent instead of the front's own. Raises Unreachable."""
        request = self._request(method, path, body, headers, key or (self.key if with_key else None))
        started_s = self._monotonic_s()
        try:
            response = self._client.send(request, stream=True)
            raw = self._read(response, started_s)
        except (httpx.HTTPError, EndlessAnswer) as exc:
            raise self._unreachable(exc) from exc
        return _answer(response, raw, (self._monotonic_s() - started_s) * 1000)

    def stream(self, path: str, body: Any) -> Stream:
        """Return a streamed answer with the times of its events. Raises Unreachable."""
        request = self._request("POST", path, body, None, self.key)
        started_s = self._monotonic_s()
        arrivals_s: list[float] = []
        is_complete = False
        try:
            response = self._client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    return Stream(_answer(response, self._read(response, started_s), 0))
                for line in lines_of(self._pieces(response, started_s)):
                    is_complete |= line == b"data: [DONE]"
                    if line.startswith(b"data:"):
                        arrivals_s.append(self._monotonic_s() - started_s)
            finally:
                response.close()
        except (httpx.HTTPError, EndlessAnswer) as exc:
            raise self._unreachable(exc) from exc
        return Stream(_answer(response, b"", (self._monotonic_s() - started_s) * 1000), arrivals_s, is_complete)

    def _request(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None, key: ApiKey | None
    ) -> httpx.Request:
        sent = dict(headers or {})
        if key is not None:
            sent["authorization"] = f"Bearer {key.value}"
        return self._client.build_request(method, path, json=body, headers=sent, extensions=self._extensions)

    def _read(self, response: httpx.Response, started_s: float) -> bytes:
        try:
            return b"".join(self._pieces(response, started_s))
        finally:
            response.close()

    def _pieces(self, response: httpx.Response, started_s: float) -> Iterator[bytes]:
        return bounded(response.iter_bytes(), until_s=started_s + self.timeout_s, monotonic_s=self._monotonic_s)

    def _unreachable(self, exc: Exception) -> Unreachable:
        where = f"{self.url.host}:{self.url.port or (443 if self.url.scheme == 'https' else 80)}"
        found = explain(exc, where=where, timeout_s=self.timeout_s)
        return Unreachable(found.reason, f"{found.hint}{_unused_proxy(str(self.url))}")


def _unused_proxy(url: str) -> str:
    with suppress(ValueError):  # a proxy that cannot be used
        if (proxy := proxy_of(url)) is not None:
            return f" {proxy.variable} names the proxy {proxy.shown}, which the doctor does not use."
    return ""


def explain(exc: Exception, *, where: str, timeout_s: float) -> Unreachable:
    """Return in words why no answer came."""
    said = str(exc).lower()
    for matches, reason, hint in _REASONS:
        if matches(exc, said):
            return Unreachable(reason.format(where=where, timeout_s=timeout_s), hint)
    return Unreachable(
        f"no connection to {where} ({type(exc).__name__})", "Check the network between this machine and the server."
    )


_REASONS: Sequence[tuple[Callable[[Exception, str], bool], str, str]] = (
    (
        lambda exc, _: isinstance(exc, EndlessAnswer),
        "the answer of {where} does not end within {timeout_s:g} s, or is far too long",
        "The answer is not from context-cache, or the model is slow: raise --timeout-s.",
    ),
    (
        lambda exc, _: isinstance(exc, httpx.ConnectTimeout | httpx.PoolTimeout),
        "no connection to {where} within {timeout_s:g} s",
        "A NetworkPolicy (networkPolicy.clients) or a firewall may drop the packets.",
    ),
    (
        lambda exc, _: isinstance(exc, httpx.TimeoutException),
        "{where} did not answer within {timeout_s:g} s",
        "Read the logs of Envoy and gateway. A model on a CPU may take longer: raise --timeout-s.",
    ),
    (
        lambda _, said: "certificate" in said,
        "the certificate of {where} is not trusted",
        "Pass its CA with --ca-file, and its name with --server-name.",
    ),
    (
        lambda _, said: any(text in said for text in ("name or service", "nodename nor", "name resolution")),
        "the host of {where} is unknown",
        "Names of Services exist only in the cluster. From outside use the address of a load balancer.",
    ),
    (
        lambda _, said: "refused" in said,
        "no process listens at {where}",
        "Is a pod behind the Service ready (`kubectl get endpointslices`), and is the port right?",
    ),
    (
        lambda exc, _: isinstance(exc, httpx.RemoteProtocolError | httpx.ReadError),
        "{where} closed the connection without an answer",
        "Is the URL's scheme right? Plain HTTP on an HTTPS port ends like this, and so does a killed pod.",
    ),
)
"""Whether an error is of a kind, what that means, and what to look at; the first that matches counts."""


def _answer(response: httpx.Response, raw: bytes, took_ms: float) -> Answer:
    text = raw.decode(errors="replace")
    try:
        body = json.loads(text)
    except (RecursionError, ValueError):
        body = None
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status_code, headers, text, took_ms, body)
