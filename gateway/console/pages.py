"""`/console` and its files, from the installed package, with headers that limit the browser.

The files are read when the gateway starts, so a missing file stops the start.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
from dataclasses import dataclass
from pathlib import PurePath

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from contextcache.errors import PathNotFound
from gateway.paths import CONSOLE_PATH

_DIRECTIVES = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
POLICY = "; ".join(_DIRECTIVES)
"""Content-Security-Policy of the page: its own scripts and styles, and calls to its own origin. No text can become
markup, because no trusted type exists for HTML."""
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",  # browsers ask each time and get a 304, so they see a new release at once
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}
_INDEX = "index.html"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""Media type by suffix. Other files of the folders, such as licences, are not served."""
_FOLDERS = ("page", "vendored")
"""Our files and the libraries. Their names share one path."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """Answer with one file."""

    media_type: str
    whole: bytes
    packed: bytes
    """`whole` in gzip."""
    etag: str


def read_files() -> dict[str, PageFile]:
    """Return the files by name. Raises OSError when the installed package lacks them."""
    found = {}
    for folder in _FOLDERS:
        for entry in importlib.resources.files("gateway.console").joinpath(folder).iterdir():
            if media_type := _MEDIA_TYPES.get(PurePath(entry.name).suffix):
                whole = entry.read_bytes()
                etag = f'W/"{hashlib.sha256(whole).hexdigest()[:32]}"'
                found[entry.name] = PageFile(media_type, whole, gzip.compress(whole, mtime=0), etag)
    return found


def console_router() -> APIRouter:
    """Return the routes of the console, and of `/`, which leads to it."""
    router = APIRouter()
    files = read_files()

    @router.get("/")
    async def root() -> Response:
        return RedirectResponse(CONSOLE_PATH)

    @router.get(CONSOLE_PATH)
    async def page(request: Request) -> Response:
        return _answer(request, files[_INDEX])

    @router.get(f"{CONSOLE_PATH}/{{name}}")
    async def page_file(request: Request, name: str) -> Response:
        if name not in files:
            raise PathNotFound("no such path")
        return _answer(request, files[name])

    return router


def _answer(request: Request, file: PageFile) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    is_packed = "gzip" in request.headers.get("accept-encoding", "")
    if is_packed:
        headers["content-encoding"] = "gzip"
    return Response(file.packed if is_packed else file.whole, headers=headers, media_type=file.media_type)
