"""What Envoy's bootstrap is made from. No environment: Envoy is a file's process, and one file says all of it."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gateway.settings import is_loopback

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ValueError(f"{text!r} is not host:port")
    return text


Address = Annotated[str, AfterValidator(_address)]
"""`host:port`; the host is a name, an IPv4 address, or an IPv6 address in brackets."""


class GatewayAddress(BaseModel):
    """One gateway process, or a name that stands for several."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """Take `http,ext_proc` too, as a command line says it."""
        if not isinstance(value, str):
            return value
        http, _, ext_proc = value.partition(",")
        return {"http": http, "ext_proc": ext_proc}

    http: Address = Field(description="its HTTP front, which answers control calls")
    ext_proc: Address = Field(description="its external processor (gRPC)")


class EnvoySettings(BaseModel):
    """Everything an Envoy in front of the pods can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateways: tuple[GatewayAddress, ...] = Field(min_length=1, description="the plugin's replicas")
    pods: tuple[Address, ...] = Field(
        min_length=1,
        description="vLLM pods; the plugin's choice is found here by IP and port, so a pod given by name gets only "
        "requests that nobody chose a pod for",
    )
    listen_host: str = Field("127.0.0.1", description="address to listen on")
    listen_port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_host: str = Field("127.0.0.1", description="address of Envoy's admin interface, which can stop it: loopback")
    admin_port: int = Field(9901, ge=0, le=65535, description="its port; 0 takes a free one")
    engine_paths: tuple[str, ...] = Field(
        ("/health", "/version", "/ping", "/tokenize", "/detokenize", "/score", "/rerank", "/v2/rerank", "/classify"),
        description="paths outside /v1/ that reach the engine, as GATEWAY_ENGINE_PATHS",
    )
    fail_open_stateless: bool = Field(
        True,
        description="serve requests that claim no context while every gateway is down; their keys are not checked then",
    )
    max_body_bytes: int = Field(
        32 << 20,
        gt=0,
        le=1 << 30,
        description="bytes of the largest request body, as GATEWAY_MAX_BODY_BYTES; more is 413",
    )
    max_heap_bytes: int = Field(
        2 << 30, ge=1 << 28, description="bytes of Envoy's own memory near which it takes no more requests (503)"
    )
    max_connections: int = Field(20_000, gt=0, description="client connections at one time; more are closed")
    max_requests: int = Field(10_000, gt=0, description="requests at one time to each cluster; more are 503")
    trusted_hops: int = Field(0, ge=0, description="proxies in front whose X-Forwarded-For is believed")
    plugin_timeout_s: float = Field(
        5.0, gt=0, description="seconds the plugin has for one message; a slow context manager (2 s) must fit in"
    )
    connect_timeout_s: float = Field(1.0, gt=0, description="seconds to connect to a gateway or a pod")
    upload_timeout_s: float = Field(300.0, gt=0, description="seconds a client has to send a whole request")
    idle_timeout_s: float = Field(600.0, gt=0, description="seconds without a byte of an answer; covers a long prompt")
    total_timeout_s: float = Field(3600.0, gt=0, description="seconds an answer may take in all")
    drain_delay_s: int = Field(
        1,
        ge=0,
        description="seconds from SIGTERM (admin /ready is 503, answers close their connection) to closing the port",
    )
    drain_timeout_s: float = Field(600.0, ge=0, description="seconds running requests get to finish after that")
    concurrency: int = Field(2, ge=1, description="worker threads")
    access_log: str = Field("/dev/stdout", description="file of the access log, JSON lines; empty: none")

    @model_validator(mode="after")
    def _admin_is_local(self) -> Self:
        if not is_loopback(self.admin_host):
            raise ValueError(f"whoever reaches the admin interface rules Envoy: loopback only, not {self.admin_host}")
        return self
