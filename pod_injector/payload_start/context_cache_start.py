"""Adds the injector's arguments to vLLM's own when vLLM's process starts, or says why it does not.

The webhook uses `refusal` for the arguments that a pod's manifest spells out. A copy of this file in vLLM's container
checks the real ones, after every shell and start script. It imports only the standard library, and PyYAML for a
configuration file, which vLLM reads with PyYAML too.

Options are read as vLLM's parser reads them: `--name value` or `--name=value`, `_` equals `-` in names, and a dotted
name is a part of a JSON option. vLLM 0.32 utils/argparse_utils.py FlexibleArgumentParser.
"""

from __future__ import annotations

import ipaddress
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ARGUMENTS_ENV = "CONTEXT_CACHE_ARGUMENTS"
"""JSON in vLLM's environment: `arguments` to add, and `port` and `https` of the release."""
REPORT_NAME = "engine-start"
"""File beside the sidecar's socket: the outcome of vLLM's last start, `added` or a reason. The sidecar shows it."""
RUST_FRONT_END_ENV = "VLLM_USE_RUST_FRONTEND"
API_SERVER = "vllm.entrypoints.openai.api_server"
COMMAND_LINE = "vllm.entrypoints.cli.main"
_DEFAULT_PORT = "8000"
"""vLLM's port without `--port`."""
_OTHER_SERVERS = ("headless", "uds", "grpc")
_CONNECTORS = ("kv-transfer-config", "kv-offloading-size", "kv-offloading-backend")
_CERTIFICATES = ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs")


def add_arguments(argv: list[str], orig_argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Extend `argv` in place if this process is vLLM's API server. Children of vLLM and other programs stay as is."""
    words = _engine_words(argv, orig_argv)
    if words is None or ARGUMENTS_ENV not in environ:
        return
    release = json.loads(environ[ARGUMENTS_ENV])
    arguments: list[str] = release["arguments"]
    if words[-len(arguments) :] == arguments:  # a wrapper in Python executed vLLM with its own arguments
        return
    refused = _refusal_at_start(words, environ, port=release["port"], https=release["https"])
    if refused is not None:
        reason, message = refused
        sys.stderr.write(f"context-cache: vLLM starts without context-cache ({reason}): {message}\n")
        # The pod's probes ask by HTTPS already, so vLLM must serve it.
        keeps_tls = reason == "kv-connector" and release["https"]
        arguments = arguments[arguments.index("--ssl-certfile") :] if keeps_tls else []
    end = argv.index("--") if "--" in argv else len(argv)
    argv[end:end] = arguments
    _report("added" if refused is None else refused[0], release["arguments"])


def refusal(options: Mapping[str, str], *, rust: str, port: int, https: bool) -> tuple[str, str] | None:
    """Return reason and message if the release could not use this vLLM; None if it could.

    `rust`: value of RUST_FRONT_END_ENV; `port`: port of every engine of the release; `https`: the added arguments
    contain a certificate.
    """
    given = {name.partition(".")[0] for name in options}

    def first(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in given), None)

    connector, server, certificate = first(_CONNECTORS), first(_OTHER_SERVERS), first(_CERTIFICATES)
    host, listens_on = options.get("host", ""), options.get("port", _DEFAULT_PORT)
    release = "the release adds another certificate" if https else "the release's gateway sends HTTP"
    obstacles = (
        (_is_on(rust), "rust-frontend", f"vLLM's Rust front end takes no ids of a chat: remove {RUST_FRONT_END_ENV}"),
        (connector, "kv-connector", f"the engine already has a KV connector (--{connector})"),
        (server, "server", f"with --{server} vLLM serves no HTTP on a port of this pod"),
        (certificate, "server", f"the engine has its own certificate (--{certificate}), but {release}"),
        (host == "localhost" or _is_loopback(host), "server", f"the engine listens on {host} only"),
        (
            listens_on.isdecimal() and int(listens_on) != port,
            "port",
            f"the engine listens on {listens_on}, but the release expects {port} (value discovery.port)",
        ),
    )
    return next(((reason, message) for applies, reason, message in obstacles if applies), None)


def read_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options among vLLM's arguments by name. As in vLLM, the last value of a name counts."""
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name.replace("_", "-")] = value if equals else following
    return options


def _engine_words(argv: Sequence[str], orig_argv: Sequence[str]) -> list[str] | None:
    """Return vLLM's arguments if this process is its API server; None for any other process."""
    # With `-m`, sys.argv has no module name until the module runs. The option may be joined: `-um NAME`, `-mNAME`.
    program = re.sub(r"^-\w*?m", "", orig_argv[-len(argv)]) if argv[0] == "-m" else Path(argv[0]).name
    if program == API_SERVER:
        return list(argv[1:])
    return list(argv[2:]) if program in {"vllm", COMMAND_LINE} and argv[1:2] == ["serve"] else None


def _refusal_at_start(
    words: Sequence[str], environ: Mapping[str, str], *, port: int, https: bool
) -> tuple[str, str] | None:
    options = read_options(words)
    if "config" in options:
        try:
            options = _file_options(options["config"]) | options
        except Exception as exc:  # noqa: BLE001  # vLLM says what is wrong with its file
            return "config-file", f"the file of --config is unreadable: {type(exc).__name__}"
    return refusal(options, rust=environ.get(RUST_FRONT_END_ENV, ""), port=port, https=https)


def _file_options(path: str) -> dict[str, str]:
    import yaml  # here, because most starts need no YAML

    return {str(name).replace("_", "-"): str(value) for name, value in yaml.safe_load(Path(path).read_text()).items()}


def _report(outcome: str, arguments: Sequence[str]) -> None:
    """Tell the sidecar the outcome, in the directory of the socket that the connector uses."""
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    socket = transfer["kv_connector_extra_config"]["sidecar"].removeprefix("unix://")
    try:
        Path(socket).with_name(REPORT_NAME).write_text(outcome)
    except OSError as exc:
        sys.stderr.write(f"context-cache: the outcome of this start was not written: {exc}\n")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_on(value: str) -> bool:
    """Return whether vLLM reads an env value as true: `bool(int(value))` in vLLM 0.32 envs.py."""
    try:
        return bool(value.strip()) and int(value) != 0
    except ValueError:
        return True
