"""All that differs between a rendered container and the process the tests start for it. Nothing else is changed.

In command, arguments, environment and mounted text files, because there is no container around the process:

1. a mount path → the folder laid out for that mount
2. 0.0.0.0, 127.0.0.1 and Valkey's `bind * -::*` → the pod's address out of 127.0.0.0/8: a pod has interfaces of its own
3. dns:///NAME → dns://ADDRESS/NAME: the test's name server is the cluster's
4. SERVICE.NAMESPACE.svc.DOMAIN:PORT in URLs → address and target port of a pod of the Service
5. Envoy's clusters that resolve names ask the test's name server

Added to the environment:

6. PATH and PYTHONPATH, which an image has; TMPDIR where /tmp is mounted
7. KUBECONFIG for the mounted token of a service account, in pods that ask for one
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.name_server import NameServer

_ADDRESSES = r"(?<![\d.])(?:0\.0\.0\.0|127\.0\.0\.1)(?![\d.])"
_SERVICE = r"(?<![\w.-])(?P<service>[\w-]+\.[\w-]+\.svc\.[\w.-]*\w):(?P<port>\d+)"


@dataclass(frozen=True)
class Substitutions:
    """The rules for one container."""

    address: str
    """Of the pod."""
    mounts: Mapping[str, Path]
    """Mount paths and their folders."""
    names: NameServer
    service: Callable[[str, int], str]
    """Host name and port of a Service → `address:port` of a pod."""

    def __call__(self, text: str) -> str:
        """Return the text with rules 1 to 4 applied, once each place."""
        return self._pattern().sub(self._replace, text)

    def file(self, content: bytes) -> bytes:
        """Return what a mounted file holds; keys and certificates stay as they are."""
        if b"-----BEGIN" in content:
            return content
        return self(content.decode()).encode()

    def bootstrap(self, command: Sequence[str]) -> None:
        """Apply rule 5 to what a command starts Envoy from, if it does: the other rules held when that was written."""
        for path in (Path(word) for word in command if word.endswith("/envoy.json")):
            path.write_text(json.dumps(self.names.asked_by(json.loads(path.read_text()))))

    def _pattern(self) -> re.Pattern[str]:
        paths = "|".join(re.escape(path) for path in sorted(self.mounts, key=len, reverse=True))
        mount = rf"(?<![\w.-])(?P<mount>{paths})(?![\w.-])" if paths else r"(?P<mount>$^)"
        return re.compile(
            rf"(?P<dns>dns:///(?P<name>\S+))|{mount}|(?P<bind>bind \* -::\*)|(?P<address>{_ADDRESSES})|{_SERVICE}"
        )

    def _replace(self, found: re.Match[str]) -> str:
        if found["dns"]:
            return f"dns://127.0.0.1:{self.names.port}/{found['name']}"
        if found["mount"]:
            return str(self.mounts[found["mount"]])
        if found["bind"]:
            return f"bind {self.address}"
        if found["address"]:
            return self.address
        return self.service(found["service"], int(found["port"]))
