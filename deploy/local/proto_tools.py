"""The stub generator's own environment, `.build/proto`, whose protobuf is older than the one at run time.

Standard library only, like the installer. With files as arguments: bound the type variables of generated stubs.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from deploy.local.environments import ROOT, made
from deploy.local.progress import exit_code

_ONE_OF_TWO = re.compile(
    r"(?s)(TypeVar\(\n    '\w+',\n    )(grpc\.\w+\[.*?\n    \]),\n    (grpc\.aio\.\w+\[.*?\n    \]),\n"
)


@exit_code
def main() -> None:
    """Make the environment from the dependency group `proto` and return the exit status."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    (made("proto", groups["proto"], needed_bytes=1 << 28) / ".installed").touch()


def bound_type_variables(stubs: Sequence[str]) -> None:
    """Let each call of a stub be blocking or asyncio by a bound instead of by a choice between two types.

    mypy-protobuf 3.7 writes the choice, and mypy 2.4 tries every combination of them: 2^16 for a service of 16 calls,
    three minutes, and twice that for each call more.
    """
    for stub in map(Path, stubs):
        stub.write_text(_ONE_OF_TWO.sub(r"\1bound=\2 | \3,\n", stub.read_text()))


if __name__ == "__main__":
    if stubs := sys.argv[1:]:
        bound_type_variables(stubs)
    else:
        sys.exit(main())
