"""Reasons for which a pod is left alone: a closed set."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Value of the annotation `context-cache.io/inject-skipped` and of the metric's label."""

    OPTED_OUT = "opted-out"
    OTHER_RELEASE = "other-release"
    HOST_NETWORK = "host-network"
    WINDOWS = "windows"
    NO_VLLM_CONTAINER = "no-vllm-container"
    SEVERAL_VLLM_CONTAINERS = "several-vllm-containers"
    KV_CONNECTOR = "kv-connector"
    PORT = "port"
    SERVER = "server"
    RUST_FRONTEND = "rust-frontend"
    NAME_TAKEN = "name-taken"
    USER = "user"
    RESOURCES = "resources"
    FS_GROUP = "fs-group"
    VLLM_VERSION = "vllm-version"
    FAULT = "fault"


class NotInjected(Exception):
    """The pod is left alone. Not in the tree of errors: no process sends it to another."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
