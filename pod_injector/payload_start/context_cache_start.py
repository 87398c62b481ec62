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
from typing import Any

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
_TRANSFER = "kv-transfer-config"
_CONNECTORS = (_TRANSFER, "kv-offloading-size", "kv-offloading-backend")
_TESTED_BESIDE = frozenset({"ExampleConnector"})
"""Connectors that ours was tested with under vLLM's MultiConnector: docs/guides/other-connectors.md."""
_POLICY, _RECOMPUTE = "kv_load_failure_policy", "recompute"
_FIELDS = frozenset({"kv_connector", "kv_role", "kv_connector_extra_config", _POLICY})
"""Fields of a connector's own config that mean the same under a MultiConnector."""
_CERTIFICATES = ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs")


def add_arguments(argv: list[str], orig_argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Extend `argv` in place if this process is vLLM's API server. Children of vLLM and other programs stay as is."""
    words = _engine_words(argv, orig_argv)
    if words is None or ARGUMENTS_ENV not in environ:
        return
    release = json.loads(environ[ARGUMENTS_ENV])
    arguments: list[str] = release["arguments"]
    num_added = len(arguments)
    if words[-num_added:] == _beside(words[:-num_added], arguments):  # a wrapper in Python executed vLLM with its own
        return
    arguments = _beside(words, arguments)
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
    is_untested = connector is not None and _tested_connector(options) is None
    tested = ", ".join(sorted(_TESTED_BESIDE))
    host, listens_on = options.get("host", ""), options.get("port", _DEFAULT_PORT)
    release = "the release adds another certificate" if https else "the release's gateway sends HTTP"
    obstacles = (
        (_is_on(rust), "rust-frontend", f"vLLM's Rust front end takes no ids of a chat: remove {RUST_FRONT_END_ENV}"),
        (
            is_untested,
            "kv-connector",
            f"the engine already has a KV connector (--{connector}) that is not tested beside ours; tested: {tested}",
        ),
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
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name.replace("_", "-")] = value if equals else following
    return options


def _tested_connector(options: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the config of the engine's only connector if it was tested beside ours, else None."""
    if [name for name in options if name.partition(".")[0] in _CONNECTORS] != [_TRANSFER]:
        return None
    try:
        config = json.loads(options[_TRANSFER])
    except ValueError:
        return None
    is_known = (
        isinstance(config, dict) and not config.keys() - _FIELDS and config.get(_POLICY, _RECOMPUTE) == _RECOMPUTE
    )
    return config if is_known and config.get("kv_connector") in _TESTED_BESIDE else None


def _beside(words: Sequence[str], arguments: list[str]) -> list[str]:
    """Return our arguments with both connectors if vLLM's own arguments have a tested one. The last value counts."""
    theirs = _tested_connector(read_options(words))
    if theirs is None:
        return arguments
    place = arguments.index(f"--{_TRANSFER}") + 1
    ours = json.loads(arguments[place])
    ours["kv_connector_extra_config"] = {**ours["kv_connector_extra_config"], "layout": ""}
    both = {"connectors": [ours, theirs]}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", _POLICY: _RECOMPUTE}
    combined = json.dumps({**config, "kv_connector_extra_config": both})
    return [*arguments[:place], combined, *arguments[place + 1 :]]


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
