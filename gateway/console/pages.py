"""`/console` and the files that belong to it, out of the installed package, with what keeps a browser from more.

Read once, when the gateway starts: a file that is missing is found then.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import mimetypes
from dataclasses import dataclass

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
"""Content-Security-Policy of the page: its own scripts and styles, calls to where it came from, nothing else. No text
can become markup: there is no type that a sink for HTML takes."""
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",  # asked again each time, and answered 304: a new release is seen at once
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}
_INDEX = "index.html"
_SERVED = {".html", ".css", ".js", ".svg"}
"""What else lies there, licences and their like, is for whoever reads the source."""
_FOLDERS = ("page", "vendored")
"""Ours, and libraries as they came; one address space."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    media_type: str
    whole: bytes
    packed: bytes
    """By gzip."""
    etag: str


def read_files() -> dict[str, PageFile]:
    """Return the files by name. Raises OSError when the installed package lacks them."""
    found = {}
    for folder in _FOLDERS:
        for entry in importlib.resources.files("gateway.console").joinpath(folder).iterdir():
            if any(map(entry.name.endswith, _SERVED)):
                found[entry.name] = _file(entry.name, entry.read_bytes())
    return found


def console_router() -> APIRouter:
    """Return the routes of the page; without them `/console` and `/` are not found."""
    router = APIRouter()
    files = read_files()

    # No words about them in the OpenAPI document: they are pages, not calls.
    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse(CONSOLE_PATH)

    @router.get(CONSOLE_PATH, include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, files[_INDEX])

    @router.get(f"{CONSOLE_PATH}/{{name}}", include_in_schema=False)
    async def page_file(request: Request, name: str) -> Response:
        if name not in files:
            raise PathNotFound("no such path")
        return _answer(request, files[name])

    return router


def _file(name: str, whole: bytes) -> PageFile:
    kind, _ = mimetypes.guess_type(name)
    # Some systems' tables still call it application/javascript.
    media_type = "text/javascript" if name.endswith(".js") else str(kind)
    etag = f'W/"{hashlib.sha256(whole).hexdigest()[:32]}"'
    return PageFile(media_type, whole, gzip.compress(whole, mtime=0), etag)


def _answer(request: Request, file: PageFile) -> Response:
    headers = HEADERS | {"etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    packed = "gzip" in request.headers.get("accept-encoding", "")
    if packed:
        headers["content-encoding"] = "gzip"
    return Response(file.packed if packed else file.whole, headers=headers, media_type=file.media_type)
