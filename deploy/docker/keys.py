"""`python3 -m deploy.docker.keys`: make the API key and the signing secret that compose.yaml uses, in `.compose/`.

Files that exist stay. The folder is readable by its owner only. The two files that containers read are readable by all,
because the processes in the containers run as another user. git ignores the folder.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".compose"


def make_keys(folder: Path = FOLDER) -> Path:
    """Write `api-key`, `api-keys.json` and `signing` where they are missing; return the path of the key."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    key = folder / "api-key"
    if not key.exists():
        _write(key, f"cc-{secrets.token_urlsafe(32)}\n", mode=0o600)
    digest = hashlib.sha256(key.read_text().strip().encode()).hexdigest()
    entry = {"sha256": digest, "tenant": "default", "name": "compose", "operator": True}
    _write(folder / "api-keys.json", json.dumps({"keys": [entry]}) + "\n", mode=0o644)
    if not (folder / "signing").exists():
        _write(folder / "signing", secrets.token_hex(32) + "\n", mode=0o644)
    return key


def _write(file: Path, text: str, *, mode: int) -> None:
    file.touch(mode=mode)
    file.write_text(text)
    file.chmod(mode)


def main() -> int:
    """Make the files and print the way to the key."""
    print(f"API key: {make_keys()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
