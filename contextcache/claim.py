r"""What a request body claims: one decoder for the gateway and the pod. Pure.

Rules: a body is read for the fields that are asked for, and nothing else in it is built (`read_claims`), or it is
built whole within bounds of depth and width (`read_object`). What counts is what the engine's parser would see: of
keys that repeat the last one, keys spelled with `\u` escapes too. What a session's request says is strict JSON in
UTF-8; other bodies are read as leniently as the engine reads them. Nothing is written anew: what our own parts say is
put behind the rest, where it counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from contextcache.errors import InvalidRequest
from contextcache.identity import KV_TRANSFER_KEY
from contextcache.input_items import check_items_of_input
from contextcache.model import SessionId
from contextcache.names import KEPT_PREFIX, MINTED_PREFIX, SESSION_ID_PATTERN, context_id
from contextcache.requests import LARGE_BYTES

SESSION_HEADER = "x-session-id"
RESPONSES_PATH = "/v1/responses"
TURN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", RESPONSES_PATH})
"""Calls that can be a context's turn, and whose KV can be kept without one: vLLM 0.32 takes a salt and our order in
each."""
IF_MISSING = "if_missing"
"""What `context_create` says in a turn whose context may not be there yet."""
FORBIDDEN_KEYS = ("cache_salt", "kv_transfer_params", "ec_transfer_params")
"""What only our own parts may tell the engine: whose prefix cache it may hit, which KV and which encoder's outputs to
load, and from which machine."""

DEPTH_MAX = 100
CONTAINERS_MAX = 32_000
"""Lists and objects. vLLM 0.32 takes 15 us for one in a message, and more for one that fits none of its types."""
STRINGS_MAX = 128_000
"""Keys and texts: four for each object, as in a message."""
VALUES_MAX = 2_200_000
"""Nearly all of them token ids: more than two million, the longest contexts there are."""
OTHER_VALUES_MAX = 128_000
"""Values outside `prompt`, `input` and `tokens`, where token ids are: vLLM 0.32 takes 60 us for a number that stands
where an object should."""
BRACKETS_MAX = 2_000_000
"""In any body, those in texts too: beyond it even reading past them takes its time, here and in the engine."""
_COLONS_MAX = 20_000
"""A body with more of them may hold so many keys that reading their names would stall a process: none is read then."""
_NARROW = 20_000
"""Values below which nobody has to look where they are."""
_NAME_BYTES_MAX = 4096
"""Of a session's or a model's name, as spelled."""
_EXTRA_ARGUMENTS_BYTES_MAX = 64 << 10

_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BACKSLASHES = re.compile(rb"\\*")
_JSON_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[\[{]")
_NULL = b"null"
_UNSET = msgspec.Raw()


class _Fields(msgspec.Struct, gc=False):
    """The keys that are asked for, as they are spelled; what has none is empty."""

    session_id: msgspec.Raw = _UNSET
    model: msgspec.Raw = _UNSET
    prompt: msgspec.Raw = _UNSET
    messages: msgspec.Raw = _UNSET
    cache_salt: msgspec.Raw = _UNSET
    kv_transfer_params: msgspec.Raw = _UNSET
    ec_transfer_params: msgspec.Raw = _UNSET
    system: msgspec.Raw = _UNSET
    instructions: msgspec.Raw = _UNSET
    input: msgspec.Raw = _UNSET
    tokens: msgspec.Raw = _UNSET
    prompt_cache_key: msgspec.Raw = _UNSET
    """What Codex calls a conversation."""
    vllm_xargs: msgspec.Raw = _UNSET
    """vLLM puts this object's keys where `kv_transfer_params` ends up too."""
    context_create: msgspec.Raw = _UNSET
    request_id: msgspec.Raw = _UNSET
    """The client's name for the request, by which vLLM names the answer."""
    previous_response_id: msgspec.Raw = _UNSET
    conversation: msgspec.Raw = _UNSET
    store: msgspec.Raw = _UNSET


_Plain = str | float | bool | None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


class _Part(msgspec.Struct, gc=False):
    """A part of a message; a tool's result has parts of its own."""

    content: list[_Object | str] | _Object | _Plain = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: list[_Part | str] | _Object | _Plain = None
    tool_calls: list[_Object] | _Object | _Plain = None


class _Forbidden(msgspec.Struct, gc=False):
    cache_salt: msgspec.Raw = _UNSET
    kv_transfer_params: msgspec.Raw = _UNSET
    ec_transfer_params: msgspec.Raw = _UNSET


_ASKED = frozenset(_Fields.__struct_fields__)
_FIELDS = msgspec.json.Decoder(_Fields)
_MESSAGES = msgspec.json.Decoder(list[_Message | list[_Message]])
_FORBIDDEN = msgspec.json.Decoder(_Forbidden)
_STRING = msgspec.json.Decoder(str)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Claims:
    """What a body that is an object says of what concerns us."""

    body: bytes = field(repr=False)
    """In UTF-8."""
    fields: _Fields = field(repr=False)
    names: frozenset[str] = frozenset()
    """Keys beside those of `fields`; none of a body that may hold too many."""
    is_lenient: bool = False
    """Whether `fields` were read with other values in the place of what strict JSON has not."""

    def session_id(self) -> SessionId | None:
        """Return the context that is named. Raises InvalidRequest when it cannot be one."""
        spelled = bytes(self.fields.session_id)
        if spelled in (b"", _NULL):
            return None
        return context_id(_name(spelled))

    def model(self) -> str | None:
        """Return the model that is named, if one is."""
        return _name(self.fields.model)

    def text(self, key: str) -> str | None:
        """Return a short text that one of the fields is."""
        return _name(getattr(self.fields, key))

    def value(self, key: str) -> Any:
        """Return what a field is; None: nothing. Raises InvalidRequest for more than a name's length."""
        spelled = bytes(getattr(self.fields, key))
        if spelled in (b"", _NULL):
            return None
        try:
            if len(spelled) <= _NAME_BYTES_MAX:
                return msgspec.json.decode(spelled)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # halves of characters, as Python reads them
        raise InvalidRequest(f"{key} must be JSON of at most {_NAME_BYTES_MAX} bytes", param=key)

    def creates_if_missing(self) -> bool:
        """Return whether the context that is named is to be created where there is none."""
        return _name(self.fields.context_create) == IF_MISSING

    def changed(
        self, *, salt: str = "", order: str = "", previous: str = "", session_id: SessionId = ""
    ) -> bytes | None:
        """Return the body with the tenant's salt and an order for the connector, and without forbidden keys.

        `previous`: the response to continue from, in the place of the client's; `session_id`: its context, where the
        body names one. Empty: no salt, no order, the client's.
        None: it can stay as it is. Of keys that repeat, the last one counts: what is put behind the rest takes the
        place of what a client says. All four are letters, digits, `.`, `_`, `-`.
        Raises InvalidRequest for extra arguments that cannot be looked through.
        """
        fields = self.fields
        ours = {key: _NULL for key in FORBIDDEN_KEYS if getattr(fields, key)}
        if salt:
            ours["cache_salt"] = b'"' + salt.encode() + b'"'
        if order:
            ours["kv_transfer_params"] = b'{"%b":"%b"}' % (KV_TRANSFER_KEY.encode(), order.encode())
        if previous:
            ours["previous_response_id"] = b'"' + previous.encode() + b'"'
        if session_id and bytes(fields.session_id) not in (b"", _NULL):
            ours["session_id"] = b'"' + session_id.encode() + b'"'
        extra = _allowed_arguments(fields.vllm_xargs)
        if extra is not None:
            ours["vllm_xargs"] = _rebuilt_arguments(self.body) if self.is_lenient else extra
        return _with_members(self.body, ours) if ours else None


def read_claims(body: bytes, path: str = "") -> Claims | None:
    """Return the claim that the engine would see; None: the body is no object, or the engine reads none of it.

    Raises InvalidRequest with line and column for a body that is no strict JSON and names a session, is too deep or
    too wide, or is large and in another encoding than UTF-8. `path`: see `check_items`.
    """
    if _JSON_START.match(body):
        _check_shape(body)
    found = _lenient_claims(body)
    if found is not None:
        check_items(path, found)
    return found


def _lenient_claims(body: bytes) -> Claims | None:
    try:
        return _strict_claims(body)
    except InvalidRequest as strict:
        if b'"session_id"' in body:
            raise
        found = _read_as_engine(body, strict)
        if found is not None and bytes(found.fields.session_id) not in (b"", _NULL):
            raise
        return found


def read_strict_claims(body: bytes, path: str = "") -> Claims:
    """Return the claim in a body of strict JSON. Raises InvalidRequest naming line, column and fault.

    `path`: see `check_items`.
    """
    _check_shape(body)
    claims = _strict_claims(body)
    check_items(path, claims)
    return claims


def check_items(path: str, claims: Claims) -> None:
    """Refuse messages, and items of a response's input, that are no objects of that kind. Raises InvalidRequest.

    The engine refuses them too, but first tries each item with every type that it knows. 3 KB of such items block
    its event loop for ten seconds.
    """
    fields = claims.fields
    _check_list("messages", fields.messages, _MESSAGES.decode)
    if path == RESPONSES_PATH:
        _check_list("input", fields.input, check_items_of_input)


def _check_list(name: str, spelled: msgspec.Raw, check: Callable[[bytes | msgspec.Raw], object]) -> None:
    """Check a field that is a list. Raises InvalidRequest."""
    if bytes(memoryview(spelled)[:1]) != b"[":
        return
    try:
        try:
            check(spelled)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            check(bytes(_with_plain_values(bytes(spelled))))
    except msgspec.ValidationError as exc:
        where = re.search(r"`\$([^`]*)`$", str(exc))
        raise InvalidRequest(f"{name}{where[1] if where else ''} has the wrong type", param=name) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"{name} is not valid JSON", param=name) from exc


def _strict_claims(body: bytes) -> Claims:
    try:
        return Claims(body, *_decoded(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _explained(body, exc) from exc


def read_object(body: bytes, path: str = "") -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequest naming line, column and fault, or the limit.

    `path`: see `check_items`; empty: they are not looked at.
    """
    _check_shape(body)
    if path:
        check_items(path, _strict_claims(body))
    try:
        return _OBJECT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _explained(body, exc) from exc


def claimed_session(claims: Claims | None, header: str | None) -> SessionId | None:
    """Return the context that a request names, or None. Raises InvalidRequest.

    `header` is `X-Session-ID`, a repeated one joined with commas: once or five times, it names the same context. A
    value that does not begin with `ctx_` is a label (`label_of`). `claims`: None when the body was not read.
    """
    named = None if claims is None else claims.session_id()
    labels = _labels(header)
    contexts = {label for label in labels if label.startswith(MINTED_PREFIX)}
    if named is not None:
        if not contexts <= {named}:
            raise InvalidRequest("the body and the X-Session-ID header name different contexts", param="session_id")
        return named
    if len(contexts) > 1:
        raise InvalidRequest("X-Session-ID is repeated with different contexts; send it once", param="X-Session-ID")
    if not contexts and claims is not None and bytes(claims.fields.context_create) not in (b"", _NULL):
        raise InvalidRequest(
            f"context_create needs a session_id in the body, or an X-Session-ID that begins with {MINTED_PREFIX}",
            param="session_id",
        )
    return contexts.pop() if contexts else None


def label_of(header: str | None) -> SessionId | None:
    """Return the label in `X-Session-ID` that may be the name of a context; None: there is none, or more than one."""
    labels = _labels(header)
    label = labels.pop() if len(labels) == 1 else ""
    is_name = SESSION_ID_PATTERN.fullmatch(label) and not label.startswith((MINTED_PREFIX, KEPT_PREFIX))
    return SessionId(label) if is_name else None


def refuse_session(claims: Claims | None) -> None:
    """Raise InvalidRequest when a call that cannot carry a context names one: it must not be answered without."""
    if claims is None:
        return
    if bytes(claims.fields.session_id) not in (b"", _NULL):
        raise InvalidRequest("session_id is not allowed here: this call cannot use a context", param="session_id")


def is_opaque(content_type: str) -> bool:
    """Return whether a body of this type is never looked into: an upload."""
    return content_type.lower().startswith("multipart/")


def remove_forbidden_keys(built: dict[str, Any]) -> None:
    """Remove the forbidden keys from a body that is built, and from its extra arguments."""
    extra = built.get("vllm_xargs")
    for held in [built, extra] if isinstance(extra, dict) else [built]:
        for key in FORBIDDEN_KEYS:
            held.pop(key, None)


def _labels(header: str | None) -> set[str]:
    return set() if header is None else {label.strip(" \t") for label in header.split(",")}


def _name(spelled: bytes | msgspec.Raw) -> str | None:
    if not 0 < len(spelled) <= _NAME_BYTES_MAX:
        return None
    try:
        return _STRING.decode(spelled)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _allowed_arguments(spelled: msgspec.Raw) -> bytes | None:
    """Return vLLM's extra arguments without forbidden keys; None when there are none in them."""
    try:
        held = _FORBIDDEN.decode(spelled) if spelled else _Forbidden()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # no object: the engine says so
    if not any(getattr(held, key) for key in FORBIDDEN_KEYS):
        return None
    if len(spelled) > _EXTRA_ARGUMENTS_BYTES_MAX:
        raise InvalidRequest(
            f"vllm_xargs with these keys may hold at most {_EXTRA_ARGUMENTS_BYTES_MAX} bytes", param="vllm_xargs"
        )
    try:
        members = _MEMBERS.decode(spelled)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _rebuilt_arguments(b'{"vllm_xargs":%b}' % bytes(spelled))  # halves of characters, as Python reads them
    kept = {key: value for key, value in members.items() if key not in FORBIDDEN_KEYS}
    return msgspec.json.encode(kept)


def _rebuilt_arguments(body: bytes) -> bytes:
    """Return the extra arguments of a body as Python reads them, without forbidden keys. Raises InvalidRequest."""
    if len(body) > LARGE_BYTES:
        raise InvalidRequest(f"a body with such vllm_xargs may hold at most {LARGE_BYTES} bytes", param="vllm_xargs")
    try:
        found = json.loads(body.decode("utf-8", "surrogatepass"))["vllm_xargs"]
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("vllm_xargs is not a valid JSON object", param="vllm_xargs") from exc
    return json.dumps({key: value for key, value in found.items() if key not in FORBIDDEN_KEYS}).encode()


def _with_members(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """Return a valid object with more members at its end, the rest as it came."""
    end = body.rindex(b"}")
    # Only an empty object ends so; looked at where it may be one, because it copies.
    is_empty = body[end - 1] in b"{ \t\r\n" and body[:end].rstrip().endswith(b"{")
    ours = b",".join(b'"%b":%b' % (key.encode(), value) for key, value in members.items())
    whole = memoryview(body)  # prompts are long: copied once
    return b"".join((whole[:end], b"" if is_empty else b",", ours, whole[end:]))


def _decoded(body: bytes | bytearray) -> tuple[_Fields, frozenset[str]]:
    """Return the fields that are asked for, and the names of all others. Raises as a decoder does."""
    if body.count(b":") <= _COLONS_MAX:
        with suppress(UnicodeDecodeError):  # in a name: the engine may read it
            members = _MEMBERS.decode(body)
            asked = {name: value for name, value in members.items() if name in _ASKED}
            return _Fields(**asked), frozenset(members.keys() - _ASKED)
    return _FIELDS.decode(body), frozenset()


def _read_as_engine(body: bytes, strict: InvalidRequest) -> Claims | None:
    """Read what Python's json would: any Unicode encoding, a byte order mark, NaN, halves of characters."""
    _check_brackets(body)
    try:
        encoding = json.detect_encoding(body)
        if encoding != "utf-8" and len(body) > LARGE_BYTES:
            raise strict  # it would be held three times over
        text = body if encoding == "utf-8" else body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        if text is not body:
            _check_shape(text)
        return Claims(text, *_decoded(_with_plain_values(text)), is_lenient=True)
    except RecursionError:
        raise strict from None
    except (msgspec.DecodeError, UnicodeError):
        return None


def _with_plain_values(text: bytes) -> bytearray:
    r"""Return the same keys in the same places, with values that strict JSON has in the place of others.

    `\ud…` becomes `\uc…`, letters that no key of ours has: half a character is then a whole one, and a whole one two.
    """
    plain_text = bytearray(text)
    for odd, plain in ((b"NaN", b"0.0"), (b"Infinity", b"0.000000"), (rb"\ud", rb"\uc"), (rb"\uD", rb"\uc")):
        # Piece by piece, each with what begins in it: one copy of a large body beside the body is enough.
        for start in range(0, len(plain_text), LARGE_BYTES):
            end = start + LARGE_BYTES + len(odd) - 1
            plain_text[start:end] = plain_text[start:end].replace(odd, plain)
    return plain_text


def _check_brackets(body: bytes) -> int:
    containers = body.count(b"[") + body.count(b"{")
    if containers > BRACKETS_MAX:
        raise InvalidRequest(f"the body has more than {BRACKETS_MAX} opening brackets")
    return containers


def _check_shape(body: bytes) -> None:
    """Refuse a body with too many objects to build, here or in the engine. Raises InvalidRequest."""
    containers = _check_brackets(body)
    if containers <= DEPTH_MAX and body.count(b",") + containers <= _NARROW:
        return
    structure = _structure(body)
    values = structure.count(b",")
    if values > VALUES_MAX:
        raise InvalidRequest(f"the body has more than {VALUES_MAX} values")
    if structure.count(b"[") + structure.count(b"{") > CONTAINERS_MAX:
        raise InvalidRequest(f"the body has more than {CONTAINERS_MAX} lists and objects")
    if values > OTHER_VALUES_MAX and values - _num_ids(body) > OTHER_VALUES_MAX:
        raise InvalidRequest(f"the body has more than {OTHER_VALUES_MAX} values besides token ids")
    _check_depth(structure)


def _structure(body: bytes) -> bytes:
    """Return the brackets and commas outside strings. Raises InvalidRequest for too many strings.

    Strings are left out by cutting at their quotes, once those in them are gone; all in passes of C, over a piece at a
    time, so that no copy of a large body is held beside it.
    """
    outside: list[bytes] = []
    quotes = start = 0
    while start < len(body):
        end = min(start + LARGE_BYTES, len(body))
        if body[end - 1 : end] == b"\\":  # an escape is not cut in two
            escapes = _BACKSLASHES.match(body, end)
            end = 1 + (escapes.end() if escapes else end)
        pieces = body[start:end].replace(b"\\\\", b"").replace(rb"\"", b"").split(b'"')
        outside.append(b"".join(pieces[quotes & 1 :: 2]).translate(None, _NO_STRUCTURE))
        quotes += len(pieces) - 1
        if quotes > 2 * STRINGS_MAX:
            raise InvalidRequest(f"the body has more than {STRINGS_MAX} keys and strings")
        start = end
    return b"".join(outside)


def _num_ids(body: bytes) -> int:
    """Return how many values are in the fields of a body that are lists of numbers, or lists of those."""
    try:
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            fields = _FIELDS.decode(_with_plain_values(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    return sum(map(_num_numbers, (fields.prompt, fields.input, fields.tokens)))


def _num_numbers(spelled: msgspec.Raw) -> int:
    """Return how many commas are in a list of numbers, or of lists of them; 0: it is something else."""
    view, commas = memoryview(spelled), 0
    if bytes(view[:1]) != b"[":
        return 0
    for start in range(0, len(view), LARGE_BYTES):
        piece = bytes(view[start : start + LARGE_BYTES])
        if b'"' in piece or b"{" in piece:
            return 0
        commas += piece.count(b",")
    return commas


def _check_depth(structure: bytes) -> None:
    """Take away the innermost pairs as often as they may lie in each other; nothing may be left then."""
    brackets = structure.translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            return  # what is left has no pairs: the decoder says where
        brackets = shorter
    if brackets:
        raise InvalidRequest("invalid JSON: nested too deeply")


def _explained(body: bytes, exc: Exception) -> InvalidRequest:
    """Return what is wrong with a body in a client's words: line, column, and the comma that is too many or missing.

    The two bodies printed in the EP are not valid JSON; they are refused rather than repaired.
    """
    told = str(exc)
    if isinstance(exc, RecursionError):
        return InvalidRequest("invalid JSON: nested too deeply")
    if isinstance(exc, UnicodeDecodeError):
        return InvalidRequest("the body is not UTF-8")
    if isinstance(exc, msgspec.ValidationError):
        is_number = "out of range" in told
        return InvalidRequest(
            "invalid JSON: a number has too many digits" if is_number else "the body must be a JSON object"
        )
    if not body.strip():
        return InvalidRequest("invalid JSON at line 1, column 1: the body is empty")
    return _placed(body, told)


def _placed(body: bytes, told: str) -> InvalidRequest:
    found = re.search(r"^(?:JSON is malformed: )?(.*) \(byte (\d+)\)$", told)
    fault, position = (
        (found[1], int(found[2])) if found else ("unexpected end of the body, or an incomplete character", len(body))
    )
    at = body[position : position + 1]
    before = len(body[:position].rstrip()) if position < len(body) else position
    for constant, start in ((b"NaN", position), (b"Infinity", position), (b"-Infinity", position - 1)):
        if start >= 0 and body.startswith(constant, start):
            return InvalidRequest(f"invalid JSON: {constant.decode()} is not a JSON number")
    if at >= b"\x80":
        return InvalidRequest(f"the body is not UTF-8, or not JSON: invalid byte at offset {position}")
    if fault.startswith("trailing comma"):
        position, fault = before - 1, f"extra comma before '{at.decode()}'"
    elif fault.startswith("expected ','"):
        position, fault = before, "missing comma"
    line = body.count(b"\n", 0, position) + 1
    column = len(body[body.rfind(b"\n", 0, position) + 1 : position].decode(errors="replace")) + 1
    return InvalidRequest(f"invalid JSON at line {line}, column {column}: {fault}")
