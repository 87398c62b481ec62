"""URL and API key of the command line: from options, then the environment, then the file that `login` writes."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path

from contextcache.client.failures import ClientError

URL_VARIABLE, KEY_VARIABLE = "CONTEXT_CACHE_URL", "CONTEXT_CACHE_API_KEY"


class NotConfigured(ClientError):
    """The URL or the API key is missing."""


def config_file() -> Path:
    """Return the file that `login` writes: `$XDG_CONFIG_HOME/context-cache/config.toml`, `~/.config` by default."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "context-cache" / "config.toml"


def find_place(url: str | None, key: str | None) -> tuple[str, str]:
    """Return URL and key. Raises NotConfigured, also for a file that others may read."""
    url = url or os.environ.get(URL_VARIABLE)
    if key == "":
        raise NotConfigured("the API key is empty")  # a stored key must not replace it
    key = key or os.environ.get(KEY_VARIABLE)
    if url and key:
        return url, key
    stored = _read(config_file())
    # The stored key is only for the stored server.
    key = key or (stored.get("api_key") if url in {None, "", stored.get("url")} else None)
    url = url or stored.get("url")
    if not url:
        raise NotConfigured(f"no server URL: set --url or {URL_VARIABLE}, or run `context-cache login URL`")
    if not key:
        other = f" (the stored key is for {stored['url']})" if "url" in stored else ""
        cure = f"set --api-key-file or {KEY_VARIABLE}, or run `context-cache login URL`"
        raise NotConfigured(f"no API key for this server{other}: {cure}")
    return url, key


def write_place(url: str, key: str) -> Path:
    """Store a server and a key, readable only for this user. Return the file."""
    file = config_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unready = file.with_suffix(".new")
    unready.unlink(missing_ok=True)
    descriptor = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        # A TOML string of ASCII is a JSON string.
        out.write(f"url = {json.dumps(url)}\napi_key = {json.dumps(key)}\n")
    unready.replace(file)
    return file


def _read(file: Path) -> dict[str, str]:
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise NotConfigured(f"{file} holds a key that other users can read: run chmod 600 {file}")
        found = tomllib.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise NotConfigured(f"{file} is not valid: {exc}") from exc
    return {key: value for key, value in found.items() if isinstance(value, str)}
