"""A deployment that is well, as a table of answers; a test damages one and looks at what is found."""

from __future__ import annotations

import json
from email.utils import formatdate

import httpx

from contextcache.doctor.front import ApiKey, Front

KEY = "cc-right-key"
NOW_S = 1_800_000_000.0
SESSION = "ctx_1"
RECEIPTS = {
    "x-session-id": SESSION,
    "x-context-cache": "hit",
    "x-context-cached-tokens": "59",
    "x-context-generation": "2",
}
POD = {"ready": True, "draining": False, "tiers": ["disk", "host"]}


def usage(computed, cached, context, *, counted=None):
    """`counted`: `prompt_tokens`, where it is not the computed tokens."""
    counted = computed if counted is None else counted
    return {
        "prompt_tokens": counted,
        "completion_tokens": 8,
        "total_tokens": counted + 8,
        "context": {
            "computed_tokens": computed,
            "cached_tokens": cached,
            "saved_tokens": cached,
            "context_tokens": context,
            "source": "host" if cached else "none",
        },
    }


class Deployment:
    """Answers like a gateway in front of one pod. `answers` replaces single ones: (method, path) to an answer."""

    def __init__(self):
        self.answers = {}
        self.requests = []
        self.deleted = False
        self.clock_s = NOW_S

    def front(self, *, key=KEY):
        return Front(
            "http://cc.llm.svc",
            key=None if key is None else ApiKey(key),
            timeout_s=5,
            transport=httpx.MockTransport(self._handle),
        )

    def _handle(self, request):
        self.requests.append(request)
        changed = self.answers.get((request.method, request.url.path))
        if isinstance(changed, Exception):
            raise changed
        if callable(changed):
            changed = changed(request)
        status, body, *headers = changed or self._well(request)
        sent = {"date": formatdate(self.clock_s, usegmt=True), **(headers[0] if headers else {})}
        if isinstance(body, str):
            return httpx.Response(status, text=body, headers=sent)
        return httpx.Response(status, json=body, headers=sent)

    def _well(self, request):
        path = request.url.path
        open_paths = {
            "/healthz": {"status": "ok"},
            "/readyz": {"ready": True, "missing": [], "endpoints": {"pod-a": POD}},
            "/openapi.json": {"info": {"title": "context-cache"}},
        }
        if path in open_paths:
            return 200, open_paths[path]
        if path == "/metrics":
            return 200, "contextcache_gateway_ext_proc_streams 1\n"
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return error(401, "invalid_api_key")
        if path == "/v1/context":
            return self._context(request)
        if path.startswith("/v1/context/"):
            return self._one_context(request)
        if path == "/v1/completions":
            return self._completion(json.loads(request.content))
        return {"/v1/models": (200, {"data": [{"id": "m"}]}), "/version": (200, {"version": "0.32.0"})}[path]

    def _context(self, request):
        if request.method == "GET":
            return 200, {"object": "list", "data": []}
        return 200, {"session_id": SESSION, "usage": usage(52, 0, 0)}, RECEIPTS

    def _one_context(self, request):
        if request.url.path != f"/v1/context/{SESSION}" or self.deleted:
            return error(404, "context_not_found")
        if request.method == "DELETE":
            self.deleted = True
            return 200, {"status": "success"}
        return 200, {"generation": 2, "tiers": ["host"], "bytes": 9, "holder": {"state": "sealed"}}

    def _completion(self, body):
        if body.get("stream"):
            return 200, "".join(f"data: {piece}\n\n" for piece in ("{}", "{}", "[DONE]"))
        if "session_id" not in body:
            return 200, {"usage": {"prompt_tokens": 1}}
        if self.deleted:
            return error(404, "context_not_found")
        return 200, {"usage": usage(10, 59, 60)}, RECEIPTS


def error(status, code):
    return status, {"error": {"message": f"a {code}", "code": code}}
