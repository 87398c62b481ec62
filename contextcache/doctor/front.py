"""HTTP requests of the doctor. A status is never an error here: the checks judge it. The only importer of httpx."""

from __future__ import annotations

import copy
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from contextcache.client._sync.transport import bounded, read_whole
from contextcache.client.events import StreamReader
from contextcache.client.failures import ApiError, BrokenStream, NotUnderstood, error_of
from contextcache.client.proxies import proxy_of
from contextcache.client.retries import json_of, named

_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key, which no report, log line or traceback shows."""

    value: str = field(repr=False)


class Unreachable(Exception):
    """No answer came. `hint` names the things to check."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    text: str
    took_ms: float
    body: Any
    """The parsed JSON; an empty object if the body is not JSON."""

    @property
    def code(self) -> str:
        """`error.code` of an error of ours, else empty."""
        return str(error_of(self.body).get("code", ""))

    def describe(self) -> str:
        """Return the status, code and message of an error, shortened."""
        message = str(error_of(self.body).get("message", ""))[:_ERROR_CHARS]
        return " ".join(filter(None, (str(self.status), self.code, message)))


@dataclass(frozen=True, slots=True)
class TimedStream:
    """A streamed answer, as the times of its events."""

    answer: Answer
    arrivals_s: Sequence[float] = ()
    """Seconds from the request to each event."""
    is_complete: bool = False
    """Whether `[DONE]` came."""


class Front:
    """One URL, with an API key or without."""

    def __init__(
        self,
        url: str,
        *,
        key: ApiKey | None = None,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        transport: httpx.BaseTransport | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server_name`: the name in the certificate if it is not the URL's host."""
        self.url, self.key, self._timeout_s, self._monotonic_s = httpx.URL(url.rstrip("/")), key, timeout_s, monotonic_s
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        # The doctor asks the deployment itself, without the proxies of the environment.
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout_s, verify=tls or True, transport=transport, trust_env=False
        )

    def with_key(self, key: ApiKey | None) -> Front:
        """Return the same front with another key; None: without a key."""
        other = copy.copy(self)
        other.key = key
        return other

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Return the answer to one request. Raises Unreachable."""
        began_s = self._monotonic_s()
        try:
            response = self._whole(self._send(method, path, body, headers))
        except (httpx.HTTPError, NotUnderstood) as exc:
            raise self._unreachable(exc) from exc
        return self._answer(response, began_s)

    def stream(self, path: str, body: Any) -> TimedStream:
        """Return the times of a streamed answer's events. Raises Unreachable."""
        began_s, arrivals_s, reader = self._monotonic_s(), list[float](), StreamReader({})
        try:
            response = self._send("POST", path, body)
            if response.status_code != httpx.codes.OK:
                return TimedStream(self._answer(self._whole(response), began_s))
            with closing(response), suppress(ApiError):
                for piece in bounded(response, self._timeout_s, monotonic_s=self._monotonic_s):
                    arrivals_s += [self._monotonic_s() - began_s for _ in reader.feed(piece)]
        except (httpx.HTTPError, BrokenStream, NotUnderstood) as exc:
            raise self._unreachable(exc) from exc
        return TimedStream(self._answer(httpx.Response(httpx.codes.OK), began_s), arrivals_s, reader.is_finished)

    def _send(self, method: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
        key = {} if self.key is None else {"authorization": f"Bearer {self.key.value}"}
        request = self._http.build_request(
            method, path, json=body, headers={**(headers or {}), **key}, extensions=self._extensions
        )
        return self._http.send(request, stream=True)

    def _whole(self, response: httpx.Response) -> httpx.Response:
        return read_whole(response, self._timeout_s, monotonic_s=self._monotonic_s)

    def _answer(self, response: httpx.Response, began_s: float) -> Answer:
        took_ms = (self._monotonic_s() - began_s) * 1000
        return Answer(response.status_code, named(response), response.text, took_ms, json_of(response))

    def _unreachable(self, exc: Exception) -> Unreachable:
        where = f"{self.url.host}:{self.url.port or (443 if self.url.scheme == 'https' else 80)}"
        reason, hint = _explained(exc, where, self._timeout_s)
        with suppress(ValueError):  # a proxy that cannot be used
            if (proxy := proxy_of(str(self.url))) is not None:
                hint += f" {proxy.variable} names the proxy {proxy.shown}, which the doctor does not use."
        return Unreachable(reason, hint)


def _explained(exc: Exception, where: str, timeout_s: float) -> tuple[str, str]:
    """Return the reason for which no answer came, and the things to check."""
    text = str(exc).lower()
    if isinstance(exc, BrokenStream | NotUnderstood) or "did not end" in text:
        reason = f"the answer of {where} does not end within {timeout_s:g} s, or is far too long"
        hint = "The answer is not from context-cache, or the model is slow: raise --timeout-s."
    elif isinstance(exc, httpx.ConnectTimeout | httpx.PoolTimeout):
        reason = f"no connection to {where} within {timeout_s:g} s"
        hint = "A NetworkPolicy (networkPolicy.clients) or a firewall may drop the packets."
    elif isinstance(exc, httpx.TimeoutException):
        reason = f"{where} did not answer within {timeout_s:g} s"
        hint = "Read the logs of Envoy and gateway. A model on a CPU may take longer: raise --timeout-s."
    elif "certificate" in text:
        reason = f"the certificate of {where} is not trusted"
        hint = "Pass its CA with --ca-file, and its name with --server-name."
    elif any(part in text for part in ("name or service", "nodename nor", "name resolution")):
        reason = f"the host of {where} is unknown"
        hint = "Names of Services exist only in the cluster. From outside use the address of a load balancer."
    elif "refused" in text:
        reason = f"no process listens at {where}"
        hint = "Is a pod behind the Service ready (`kubectl get endpointslices`), and is the port right?"
    elif isinstance(exc, httpx.RemoteProtocolError | httpx.ReadError):
        reason = f"{where} closed the connection without an answer"
        hint = "Is the URL's scheme right? Plain HTTP on an HTTPS port ends like this, and so does a killed pod."
    else:
        reason = f"no connection to {where} ({type(exc).__name__})"
        hint = "Check the network between this machine and the server."
    return reason, hint
