"""Why a pod is left as it is: a closed set of reasons, each with words for the person who asked for the injection."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """What the annotation `context-cache.io/inject-skipped` and the metrics call it."""

    OPTED_OUT = "opted-out"
    OTHER_RELEASE = "other-release"
    HOST_NETWORK = "host-network"
    WINDOWS = "windows"
    NO_VLLM_CONTAINER = "no-vllm-container"
    SEVERAL_VLLM_CONTAINERS = "several-vllm-containers"
    COMMAND_UNKNOWN = "command-unknown"
    SHELL_SCRIPT = "shell-script"
    CONFIG_FILE = "config-file"
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
    """The pod cannot, or shall not, be injected. Not in the tree of errors: it is an answer and crosses no wire."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
