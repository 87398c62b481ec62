"""Makes `contextcache/client/_sync` out of `_async`, by unasync; with `--check` says whether it is that already."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

CLIENT = Path(__file__).resolve().parents[1] / "contextcache" / "client"
_NAMES = {
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
"""Beside those that unasync knows."""


def main() -> int:
    """Write, or check; exit 1 when what is there is not what would be made."""
    made = made_files()
    if "--check" in sys.argv[1:]:
        stale = [file.name for file, text in made.items() if not file.exists() or file.read_text() != text]
        if stale:
            print(f"not made from _async: {', '.join(stale)}; run `python -m deploy.sync_client`")
        return 1 if stale else 0
    for file, text in made.items():
        file.write_text(text)
    return 0


def made_files() -> dict[Path, str]:
    """Return what `_sync` would be."""
    sources = sorted((CLIENT / "_async").glob("*.py"))
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / "_async" / source.name for source in sources]
        copies[0].parent.mkdir()
        for copy, source in zip(copies, sources, strict=True):
            copy.write_text(source.read_text())
        unasync.unasync_files([str(copy) for copy in copies], [unasync.Rule("/_async/", "/_sync/", _NAMES)])
        folder_made = Path(folder) / "_sync"
        text = [(CLIENT / "_sync" / source.name, folder_made / source.name) for source in sources]
        for _, made in text:
            _tidy(made)
        return {file: made.read_text() for file, made in text}


def _tidy(file: Path) -> None:
    """Sort imports, wrap lines and yield as one does without `async`."""
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(CLIENT.parents[1] / "pyproject.toml")]
    subprocess.run(
        [*ruff, "check", "--quiet", "--fix-only", "--unsafe-fixes", "--select", "I,F401,UP028", *config, str(file)],
        check=False,
    )
    subprocess.run([*ruff, "format", "--quiet", *config, str(file)], check=True)


if __name__ == "__main__":
    sys.exit(main())
