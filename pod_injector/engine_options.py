"""What vLLM's options say about an engine: whether it can be given our connector and be reached. Pure.

Options are read as vLLM's parser does: `--name value` or `--name=value`, `_` as good as `-` in names, dotted names for
parts of JSON options (`--kv-transfer-config.kv_connector`), a unique beginning of a name is not accepted by us.
vLLM 0.32 utils/argparse_utils.py FlexibleArgumentParser.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from pod_injector.not_injected import NotInjected, Reason

DEFAULT_PORT = 8000
"""vLLM's."""
_OTHER_SERVERS = ("headless", "uds", "grpc")
_CONNECTORS = ("kv-transfer-config", "kv-offloading-size", "kv-offloading-backend")
_CERTIFICATES = ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs")
_LENGTH_MAX = 2 << 20
"""Of all arguments: execve's ARG_MAX, as long as nobody raises the limit of the stack."""
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)|\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


def expanded(words: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return words with `$(NAME)`, `$NAME` and `${NAME}` replaced where the pod says what they are.

    Raises NotInjected when they get longer than any process's arguments may be: a few bytes could stand for gigabytes.
    """
    found: list[str] = []
    left = _LENGTH_MAX
    for word in words:
        left -= len(word) + sum(len(env.get(_name(match), "")) for match in _VARIABLE.finditer(word))
        if left < 0:
            raise NotInjected(Reason.COMMAND_UNKNOWN, "the command line is longer than Linux allows")
        found.append(_VARIABLE.sub(lambda match: env.get(_name(match), match[0]), word))
    return found


def _name(variable: re.Match[str]) -> str:
    return variable[1] or variable[2]


class EngineOptions:
    """The options of one vLLM API server; the last of a name counts, as with vLLM."""

    def __init__(self, words: Sequence[str]) -> None:
        """Take what follows `vllm serve`, expanded as far as is known."""
        self._values: dict[str, str] = {}
        for index, word in enumerate(words):
            if not word.startswith("--"):
                continue
            if word == "--":
                raise NotInjected(Reason.COMMAND_UNKNOWN, "nothing can be appended after a bare -- in the command line")
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            self._values[name.replace("_", "-")] = value if equals else following

    def check(self, *, port: int, https: bool, trusts_config_file: bool) -> None:
        """Raise NotInjected unless the gateway could reach this engine and no connector is in the way.

        `port`: where every pod of the release serves; `https`: certificates will be added.
        """
        if "config" in self._values and not trusts_config_file:
            raise NotInjected(
                Reason.CONFIG_FILE,
                "the file of --config cannot be read here. If it sets neither a port nor a KV connector, set the "
                'annotation context-cache.io/config-file: "trusted"',
            )
        if name := self._first(_CONNECTORS):
            raise NotInjected(Reason.KV_CONNECTOR, f"the engine already has a KV connector (--{name})")
        if name := self._first(_OTHER_SERVERS):
            raise NotInjected(Reason.SERVER, f"with --{name} vLLM serves no HTTP on a port of this pod")
        if https and (name := self._first(_CERTIFICATES)):
            raise NotInjected(Reason.SERVER, f"the engine and the release both have a certificate (--{name})")
        if not https and self._first(_CERTIFICATES):
            raise NotInjected(Reason.SERVER, "the engine serves HTTPS, but the release's gateway sends HTTP")
        self._check_address(port)

    def _first(self, names: Sequence[str]) -> str | None:
        # A part of a JSON option counts as the option.
        given = {name.partition(".")[0] for name in self._values}
        return next((name for name in names if name in given), None)

    def _check_address(self, port: int) -> None:
        host = self._values.get("host", "")
        if host == "localhost" or _is_loopback(host):
            raise NotInjected(Reason.SERVER, f"the engine listens on {host} only")
        said = self._values.get("port", str(DEFAULT_PORT))
        if said != str(port):
            shown = said if said.isdecimal() else "an unknown port"
            raise NotInjected(
                Reason.PORT, f"the engine listens on {shown}, but the release expects {port} (value discovery.port)"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
