"""Generates the sources of the client that git does not hold: its synchronous half, and a class for each error code.

A build hook of hatchling runs it for the wheel and for an editable install. `make` and the tests run it again when a
source is newer. It needs unasync and hatchling, and no package of ours (ADR 0106).
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import unasync
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
_SYNC_NAMES = {
    "AsyncContextCache": "ContextCache",
    "AsyncContexts": "Contexts",
    "AsyncContext": "Context",
    "AsyncReplyStream": "ReplyStream",
    "AsyncOpenAI": "OpenAI",
    "DefaultAsyncHttpxClient": "DefaultHttpxClient",
    "AsyncClient": "Client",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "_async": "_sync",
    "aclose": "close",
    "aread": "read",
    "aiter_bytes": "iter_bytes",
    "asyncio": "time",
}
"""Synchronous names, beside those that unasync knows."""
_ERRORS_HEAD = '''"""Errors of the client. Each `code` of docs/reference/errors.md is a class."""

from __future__ import annotations

from collections.abc import Mapping

from contextcache.client.failures import ApiError as ApiError
from contextcache.client.failures import BrokenStream as BrokenStream
from contextcache.client.failures import ClientError as ClientError
from contextcache.client.failures import ConnectionFailed as ConnectionFailed
from contextcache.client.failures import NotCreated as NotCreated
from contextcache.client.failures import NotUnderstood as NotUnderstood
'''
_ERROR = '''

class {name}(ApiError):
    """{meaning}"""

    code = "{code}"
'''
_ERRORS_END = '''

BY_CODE: Mapping[str, type[ApiError]] = ApiError.by_code
"""Every class by its code."""
'''


class GeneratedSources(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own use has none
    """Generates the sources before hatchling collects the files of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002  # hatchling's
        """Write them into the tree. An editable install reads them there."""
        write(Path(self.root))


def write(root: Path = ROOT) -> None:
    """Write each generated file whose sources are newer. A reader never sees half a file."""
    client = root / "contextcache" / "client"
    inputs = [Path(__file__), root / "contextcache" / "errors.py", *(client / "_async").glob("*.py")]
    outputs = [client / "errors.py", *(client / "_sync" / source.name for source in inputs[2:])]
    newest = max(source.stat().st_mtime_ns for source in inputs)
    if all(file.exists() and file.stat().st_mtime_ns > newest for file in outputs):
        return
    with tempfile.TemporaryDirectory(dir=client, prefix=".generated-") as folder:
        errors = Path(folder, "errors.py")
        errors.write_text(_errors(root))
        errors.replace(client / "errors.py")
        (client / "_sync").mkdir(exist_ok=True)
        for source in inputs[2:]:
            copy = Path(folder, "_async", source.name)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(source.read_text())
            unasync.unasync_files([str(copy)], [unasync.Rule("/_async/", "/_sync/", _SYNC_NAMES)])
            Path(folder, "_sync", source.name).replace(client / "_sync" / source.name)


def _errors(root: Path) -> str:
    """Return `client/errors.py`: the public classes of `contextcache/errors.py`, named after their codes."""
    spec = importlib.util.spec_from_file_location("_errors", root / "contextcache" / "errors.py")
    assert spec is not None
    assert spec.loader is not None
    tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tree)
    classes = [
        _ERROR.format(name=code.title().replace("_", ""), meaning=error.__doc__, code=code)
        for code, error in tree.ERRORS_BY_CODE.items()
        if error.is_public
    ]
    return "".join([_ERRORS_HEAD, *classes, _ERRORS_END])


if __name__ == "__main__":
    write()
