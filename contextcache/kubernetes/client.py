"""Client of the Kubernetes API server, and the only importer of `kubernetes` (ADR 0013). It has no loops.

The library finds the server and its credentials, and makes connections and requests. Its typed calls are not used,
because each answer is bounded and checked here. Deadlines are ours.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Self

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import incluster_config

from contextcache.kubernetes.objects import (
    KubernetesAnswerInvalid,
    KubernetesObject,
    KubernetesUnauthorized,
    KubernetesUnavailable,
    Listing,
    Selection,
    WatchEvent,
    answered_error,
    checked_page,
    json_object,
    resource_version_of,
    status_error,
)

_CONNECT_S = 5.0
_LIST_S = 30.0
"""Deadline of one page of a list."""
_GRACE_S = 10.0
"""Time after a watch's end at which its connection counts as dead."""
_PAGE_OBJECTS = 500
_PAGES_MAX = 200
_BODY_BYTES_MAX = 64 << 20
_SERVICE_ACCOUNT = Path(incluster_config.SERVICE_TOKEN_FILENAME).parent

Access = Callable[[], Awaitable[Configuration]]
"""Reads the server's address and the credentials anew at each call."""


class KubernetesApi:
    """One API server; every call has a deadline and raises KubernetesError."""

    def __init__(self, access: Access, *, namespace: str) -> None:
        self._access = access
        self.namespace = namespace
        """Namespace of this process."""
        self._client: ApiClient | None = None

    @classmethod
    def by_surroundings(cls) -> Self:
        """Use the file of `KUBECONFIG` (or `~/.kube/config`), else the pod's service account.

        Raises ValueError if there is neither. The server may still be down.
        """
        file = Path(config.KUBE_CONFIG_DEFAULT_LOCATION).expanduser()
        try:
            if file.exists():
                _, current = config.list_kube_config_contexts(str(file))
                return cls(lambda: _from_file(file), namespace=current["context"].get("namespace") or "default")
            return cls.in_pod(_SERVICE_ACCOUNT)
        except (config.ConfigException, KeyError, OSError) as exc:
            raise ValueError(f"no Kubernetes API server configured: {exc}") from exc

    @classmethod
    def in_pod(cls, service_account: Path, *, environ: Mapping[str, str] | None = None) -> Self:
        """Use a mounted service account: `token`, `ca.crt` and `namespace`. Raises OSError without one."""
        namespace = (service_account / "namespace").read_text().strip()
        return cls(lambda: _from_pod(service_account, environ), namespace=namespace)

    async def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def list(self, selection: Selection) -> Listing:
        """Return the newest state, from a quorum of the store: the request names no resource version."""
        resource = selection.resource
        objects: list[KubernetesObject] = []
        query = {"labelSelector": selection.label_selector, "limit": str(_PAGE_OBJECTS)}
        for _ in range(_PAGES_MAX):
            async with self._answer(resource.path(selection.namespace), query=query, timeout_s=_LIST_S) as answer:
                page = json_object(await _whole(answer))
            items = checked_page(resource, page)
            metadata = page.get("metadata") or {}
            objects += items
            if not metadata.get("continue"):
                return Listing(tuple(objects), resource_version_of(page))
            query = query | {"continue": metadata["continue"]}
        raise KubernetesAnswerInvalid(f"{resource.kind}List has more than {_PAGES_MAX} pages")

    @asynccontextmanager
    async def watch(
        self, selection: Selection, *, resource_version: str, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Follow the changes after `resource_version`, in order, for `timeout_s` or until the server ends the watch.

        Raises KubernetesExpired when the server no longer has them.
        """
        query = {
            "watch": "1",
            "labelSelector": selection.label_selector,
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        path = selection.resource.path(selection.namespace)
        async with (
            self._answer(path, query=query, timeout_s=timeout_s + _GRACE_S) as answer,
            aclosing(_events(answer)) as events,
        ):
            yield events

    @asynccontextmanager
    async def _answer(
        self, path: str, *, query: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its successful answer; maps foreign errors, also those of the block."""
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._connected()
                request = await client.param_serialize(
                    "GET",
                    path,
                    query_params=list(query.items()),
                    header_params={"Accept": "application/json"},
                    auth_settings=["BearerToken"],
                )
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(_CONNECT_S, timeout_s))
                raw = await client.call_api(*request, _request_timeout=timeout, _preload_content=False)
                async with raw.response as answer:
                    if answer.status >= 300:
                        raise answered_error(answer.status, await _whole(answer))
                    yield answer
        except KubernetesUnauthorized:
            # The next call reads the credentials anew: they may have been replaced.
            await self.close()
            raise
        except (aiohttp.ClientSSLError, ssl.SSLError, config.ConfigException) as exc:
            # The CA may have been replaced too.
            await self.close()
            raise KubernetesUnavailable(
                f"connection to the Kubernetes API server failed: {type(exc).__name__}"
            ) from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise KubernetesUnavailable(f"no answer from the Kubernetes API server: {type(exc).__name__}") from exc

    async def _connected(self) -> ApiClient:
        if self._client is None:
            client = ApiClient(await self._access())
            client.user_agent = "context-cache"
            if self._client is not None:
                # Another task connected first.
                await client.close()
            else:
                self._client = client
        return self._client


async def _from_file(file: Path) -> Configuration:
    found = _configuration()
    await config.load_kube_config(str(file), client_configuration=found, persist_config=False)
    return found


async def _from_pod(service_account: Path, environ: Mapping[str, str] | None) -> Configuration:
    found = _configuration()
    more = {} if environ is None else {"environ": environ}
    # The loader reads the token every minute, because it rotates.
    incluster_config.InClusterConfigLoader(
        token_filename=str(service_account / "token"), cert_filename=str(service_account / "ca.crt"), **more
    ).load_and_set(found)
    return found


def _configuration() -> Configuration:
    found = Configuration()
    # Python 3.13 rejects CAs without an authority key identifier, as clusters often have. Go accepts them.
    found.disable_strict_ssl_verification = True
    return found


async def _events(answer: aiohttp.ClientResponse) -> AsyncGenerator[WatchEvent, None]:
    while True:
        try:
            line = await answer.content.readline()
        except ValueError as exc:
            raise KubernetesAnswerInvalid("a watch event from the Kubernetes API server is too large") from exc
        if not line:
            return
        event = json_object(line)
        kind, subject = event.get("type"), event.get("object")
        if not isinstance(subject, dict):
            raise KubernetesAnswerInvalid("a watch event from the Kubernetes API server has no object")
        if kind == "ERROR":
            raise status_error(subject.get("code"), subject)
        if kind in {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"}:
            yield WatchEvent(kind, subject)


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    pieces: list[bytes] = []
    size_bytes = 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > _BODY_BYTES_MAX:
            raise KubernetesAnswerInvalid(f"the Kubernetes API server's answer has more than {_BODY_BYTES_MAX} bytes")
    return b"".join(pieces)
