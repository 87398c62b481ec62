r"""Fields of a request body that gateway and pod use: one decoder for both. Pure.

Rules:

1. Only the requested fields of a body are built (`read_claims`), or the whole body within bounds of depth and width
   (`read_object`).
2. The decoder sees the same values as the engine's parser: the last one of repeated keys, also with `\u` escapes.
3. A request that names a session must be strict JSON in UTF-8. Other bodies are read as leniently as the engine does.
4. No body is written anew. Our own fields are appended, where they take precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from contextcache.errors import InvalidRequest
from contextcache.identity import KV_TRANSFER_KEY
from contextcache.input_items import AnyObject, check_items_of_input, last_compaction
from contextcache.model import SessionId
from contextcache.names import KEPT_PREFIX, MINTED_PREFIX, SESSION_ID_PATTERN, context_id
from contextcache.requests import LARGE_BYTES

SESSION_HEADER = "x-session-id"
RESPONSES_PATH = "/v1/responses"
TURN_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", RESPONSES_PATH})
"""Calls that may be a context's turn, or whose KV may be kept. vLLM 0.32 accepts a salt and our order in each."""
IF_MISSING = "if_missing"
"""Value of `context_create` in a turn that creates its context if there is none."""
FORBIDDEN_KEYS = ("cache_salt", "kv_transfer_params", "ec_transfer_params")
"""Fields that only our own processes may set: the salt of the prefix cache, and the KV and encoder outputs to load."""

DEPTH_MAX = 100
CONTAINERS_MAX = 32_000
"""Lists and objects. vLLM 0.32 takes 15 us for one in a message, and more for one that fits none of its types."""
STRINGS_MAX = 128_000
"""Keys and strings: four for each object, as in a message."""
VALUES_MAX = 2_200_000
"""All values. Nearly all are token ids: the longest contexts have two million."""
OTHER_VALUES_MAX = 128_000
"""Values outside `prompt`, `input` and `tokens`, which hold token ids. vLLM 0.32 takes 60 us for a number in place of
an object."""
BRACKETS_MAX = 2_000_000
"""Opening brackets of any body, those in strings too. Beyond it even skipping them is slow, here and in the engine."""
_COLONS_MAX = 20_000
"""Colons of a body whose keys are all listed. More keys would block the event loop."""
_NARROW = 20_000
"""Bodies with fewer values skip the structure check."""
_NAME_BYTES_MAX = 4096
"""Bytes of a session's or a model's name, escapes included."""
_EXTRA_ARGUMENTS_BYTES_MAX = 64 << 10

_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BACKSLASHES = re.compile(rb"\\*")
_JSON_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[\[{]")
_NULL = b"null"
_UNSET = msgspec.Raw()
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)
_UNREADABLE = (*_NOT_JSON, RecursionError)

DecodedT = TypeVar("DecodedT")


class _Fields(msgspec.Struct, gc=False):
    """JSON of the requested fields. An absent field is empty."""

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
    """Codex's name of a conversation."""
    vllm_xargs: msgspec.Raw = _UNSET
    """Extra arguments. vLLM merges this object's keys into the same place as `kv_transfer_params`."""
    context_create: msgspec.Raw = _UNSET
    request_id: msgspec.Raw = _UNSET
    """The client's name for the request. vLLM derives the answer's id from it."""
    previous_response_id: msgspec.Raw = _UNSET
    conversation: msgspec.Raw = _UNSET
    store: msgspec.Raw = _UNSET
    kv_hints: msgspec.Raw = _UNSET


_Plain = str | float | bool | None


class _Part(msgspec.Struct, gc=False):
    """Part of a message. A tool's result has parts of its own."""

    content: list[AnyObject | str] | AnyObject | _Plain = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: list[_Part | str] | AnyObject | _Plain = None
    tool_calls: list[AnyObject] | AnyObject | _Plain = None


_ASKED = frozenset(_Fields.__struct_fields__)
_FIELDS = msgspec.json.Decoder(_Fields)
_MESSAGES = msgspec.json.Decoder(list[_Message | list[_Message]])
_STRING = msgspec.json.Decoder(str)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Claims:
    """Fields of a body that is a JSON object."""

    body: bytes = field(repr=False)
    """The whole body in UTF-8."""
    fields: _Fields = field(repr=False)
    names: frozenset[str] = frozenset()
    """Keys besides those of `fields`; empty for a body with too many keys."""
    is_lenient: bool = False
    """True: the body is no strict JSON, and `fields` have replacements for such values."""
    compaction: str | None = None
    """Content of the last compaction item in a response's input; None: there is none."""

    def is_set(self, key: str) -> bool:
        """Return whether a field is there and not null."""
        spelled = getattr(self.fields, key)
        return len(spelled) > 0 and bytes(memoryview(spelled)[:5]) != _NULL

    def session_id(self) -> SessionId | None:
        """Return the named context. Raises InvalidRequest for a name that no context can have."""
        return context_id(self.text("session_id")) if self.is_set("session_id") else None

    def model(self) -> str | None:
        """Return the named model."""
        return self.text("model")

    def text(self, key: str) -> str | None:
        """Return a field that is a short string; None: it is something else."""
        return _text(getattr(self.fields, key))

    def value(self, key: str) -> Any:
        """Return the value of a short field; None: it is absent. Raises InvalidRequest for a longer one."""
        spelled = getattr(self.fields, key)
        if not self.is_set(key):
            return None
        with suppress(*_UNREADABLE):  # lone surrogates, which Python's parser accepts
            if len(spelled) <= _NAME_BYTES_MAX:
                return msgspec.json.decode(spelled)
        raise InvalidRequest(f"{key} must be JSON of at most {_NAME_BYTES_MAX} bytes", param=key)

    def creates_if_missing(self) -> bool:
        """Return whether the request creates the named context if there is none."""
        return self.text("context_create") == IF_MISSING

    def changed(
        self,
        *,
        salt: str = "",
        order: str = "",
        previous: str = "",
        session_id: SessionId = "",
        returns_token_ids: bool = False,
    ) -> bytes | None:
        """Return the body with the tenant's salt and an order for the connector, and without forbidden keys.

        `previous` replaces the client's response to continue from. `session_id` replaces the context that the body
        names. `returns_token_ids` asks for the answer's ids. Empty: no change. All four texts consist of letters,
        digits, `.`, `_` and `-`.
        None: the body can stay as it is. Of repeated keys the last one counts, so appended fields replace the client's.
        Raises InvalidRequest for extra arguments that cannot be checked.
        """
        fields = self.fields
        ours = {key: _NULL for key in FORBIDDEN_KEYS if getattr(fields, key)}
        if salt:
            ours["cache_salt"] = b'"%b"' % salt.encode()
        if order:
            ours["kv_transfer_params"] = b'{"%b":"%b"}' % (KV_TRANSFER_KEY.encode(), order.encode())
        if previous:
            ours["previous_response_id"] = b'"%b"' % previous.encode()
        if session_id and self.is_set("session_id"):
            ours["session_id"] = b'"%b"' % session_id.encode()
        if returns_token_ids:
            ours["return_token_ids"] = b"true"
        extra = _allowed_arguments(fields.vllm_xargs)
        if extra is not None:
            ours["vllm_xargs"] = _rebuilt_arguments(self.body) if self.is_lenient else extra
        return _with_members(self.body, ours) if ours else None


def read_claims(body: bytes, path: str = "") -> Claims | None:
    """Return the fields that the engine would see; None: the body is no object, or the engine cannot read it.

    Raises InvalidRequest with line and column for a body that names a session and is no strict JSON, is too deep or
    too wide, or is large and not in UTF-8. `path`: see `_checked`.
    """
    if _JSON_START.match(body):
        _check_shape(body)
    try:
        found = _strict_claims(body)
    except InvalidRequest as strict:
        if b'"session_id"' in body:
            raise
        lenient = _read_as_engine(body, strict)
        if lenient is None:
            return None
        if lenient.is_set("session_id"):
            raise
        found = lenient
    return _checked(path, found)


def read_strict_claims(body: bytes, path: str = "") -> Claims:
    """Return the fields of a body of strict JSON. Raises InvalidRequest with line, column and fault.

    `path`: see `_checked`.
    """
    _check_shape(body)
    return _checked(path, _strict_claims(body))


def _checked(path: str, claims: Claims) -> Claims:
    """Return claims with their compaction. Raises InvalidRequest for messages, or items of an input, of a wrong type.

    The engine refuses them too, but first tries each item with every type that it knows: 3 KB of such items block its
    event loop for ten seconds.
    """
    fields = claims.fields
    _check_list("messages", fields.messages, _MESSAGES.decode)
    if path == RESPONSES_PATH:
        _check_list("input", fields.input, check_items_of_input)
        return replace(claims, compaction=_check_list("input", fields.input, last_compaction))
    return claims


def _check_list(
    name: str, spelled: msgspec.Raw, check: Callable[[bytes | bytearray | msgspec.Raw], DecodedT]
) -> DecodedT | None:
    """Return the result of `check` for a field that is a list, else None. Raises InvalidRequest."""
    if bytes(memoryview(spelled)[:1]) != b"[":
        return None
    try:
        return _leniently(check, spelled)
    except msgspec.ValidationError as exc:
        where = re.search(r"`\$([^`]*)`$", str(exc))
        raise InvalidRequest(f"{name}{where[1] if where else ''} has the wrong type", param=name) from exc
    except _UNREADABLE as exc:
        raise InvalidRequest(f"{name} is not valid JSON", param=name) from exc


def _leniently(decode: Callable[[bytes | bytearray | msgspec.Raw], DecodedT], spelled: bytes | msgspec.Raw) -> DecodedT:
    """Decode JSON, strict or as Python reads it. Raises as the decoder."""
    try:
        return decode(spelled)
    except msgspec.ValidationError:
        raise
    except _NOT_JSON:
        return decode(_with_plain_values(bytes(spelled)))


def _strict_claims(body: bytes) -> Claims:
    try:
        return Claims(body, *_decoded(body))
    except _UNREADABLE as exc:
        raise _explained(body, exc) from exc


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequest with line, column and fault, or the exceeded limit."""
    _check_shape(body)
    try:
        return _OBJECT.decode(body)
    except _UNREADABLE as exc:
        raise _explained(body, exc) from exc


def claimed_session(claims: Claims | None, header: str | None) -> SessionId | None:
    """Return the context that a request names, or None. Raises InvalidRequest.

    `header`: all values of `X-Session-ID`, joined with commas; equal values count once. A value without the prefix
    `ctx_` is a label (`label_of`). `claims`: None if the body was not read.
    """
    named = None if claims is None else claims.session_id()
    contexts = {label for label in _labels(header) if label.startswith(MINTED_PREFIX)}
    if named is not None:
        if not contexts <= {named}:
            raise InvalidRequest("the body and the X-Session-ID header name different contexts", param="session_id")
        return named
    if len(contexts) > 1:
        raise InvalidRequest("X-Session-ID is repeated with different contexts; send it once", param="X-Session-ID")
    if not contexts and claims is not None and claims.is_set("context_create"):
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
    return label if is_name else None


def refuse_session(claims: Claims | None) -> None:
    """Raise InvalidRequest if a call without support for contexts names one."""
    if claims is not None and claims.is_set("session_id"):
        raise InvalidRequest("session_id is not allowed here: this call cannot use a context", param="session_id")


def is_opaque(content_type: str) -> bool:
    """Return whether a body of this type is never read: an upload."""
    return content_type.lower().startswith("multipart/")


def remove_forbidden_keys(built: dict[str, Any]) -> None:
    """Remove the forbidden keys from a built body and from its extra arguments."""
    extra = built.get("vllm_xargs")
    for held in [built, extra] if isinstance(extra, dict) else [built]:
        for key in FORBIDDEN_KEYS:
            held.pop(key, None)


def _labels(header: str | None) -> set[str]:
    return set() if header is None else {label.strip(" \t") for label in header.split(",")}


def _text(spelled: msgspec.Raw) -> str | None:
    try:
        return _STRING.decode(spelled) if 0 < len(spelled) <= _NAME_BYTES_MAX else None
    except _NOT_JSON:
        return None


def _allowed_arguments(spelled: msgspec.Raw) -> bytes | None:
    """Return vLLM's extra arguments without forbidden keys; None if they have none. Raises InvalidRequest."""
    try:
        held = _FIELDS.decode(spelled) if spelled else None
    except _NOT_JSON:
        return None  # No object: the engine rejects it.
    if held is None or not any(getattr(held, key) for key in FORBIDDEN_KEYS):
        return None
    if len(spelled) > _EXTRA_ARGUMENTS_BYTES_MAX:
        raise InvalidRequest(
            f"vllm_xargs with these keys may hold at most {_EXTRA_ARGUMENTS_BYTES_MAX} bytes", param="vllm_xargs"
        )
    try:
        members = _MEMBERS.decode(spelled)
    except _NOT_JSON:
        return _rebuilt_arguments(b'{"vllm_xargs":%b}' % bytes(spelled))  # lone surrogates
    return msgspec.json.encode({key: value for key, value in members.items() if key not in FORBIDDEN_KEYS})


def _rebuilt_arguments(body: bytes) -> bytes:
    """Return a body's extra arguments as Python reads them, without forbidden keys. Raises InvalidRequest."""
    if len(body) > LARGE_BYTES:
        raise InvalidRequest(f"a body with such vllm_xargs may hold at most {LARGE_BYTES} bytes", param="vllm_xargs")
    try:
        found = json.loads(body.decode("utf-8", "surrogatepass"))["vllm_xargs"]
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("vllm_xargs is not a valid JSON object", param="vllm_xargs") from exc
    return json.dumps({key: value for key, value in found.items() if key not in FORBIDDEN_KEYS}).encode()


def _with_members(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """Return a valid object with more members at its end; the other bytes stay."""
    end = body.rindex(b"}")
    # Most objects fail the cheap first test; the second one copies the body.
    is_empty = body[end - 1] in b"{ \t\r\n" and body[:end].rstrip().endswith(b"{")
    ours = b",".join(b'"%b":%b' % (key.encode(), value) for key, value in members.items())
    whole = memoryview(body)  # prompts are long: copied once
    return b"".join((whole[:end], b"" if is_empty else b",", ours, whole[end:]))


def _decoded(body: bytes | bytearray) -> tuple[_Fields, frozenset[str]]:
    """Return the requested fields and the names of all others. Raises as a decoder does."""
    if body.count(b":") <= _COLONS_MAX:
        with suppress(UnicodeDecodeError):  # in a name: the engine may read it
            members = _MEMBERS.decode(body)
            asked = {name: value for name, value in members.items() if name in _ASKED}
            return _Fields(**asked), frozenset(members.keys() - _ASKED)
    return _FIELDS.decode(body), frozenset()


def _read_as_engine(body: bytes, strict: InvalidRequest) -> Claims | None:
    """Read all that Python's json reads: any Unicode encoding, a byte order mark, NaN, lone surrogates."""
    _check_brackets(body)
    try:
        encoding = json.detect_encoding(body)
        if encoding != "utf-8" and len(body) > LARGE_BYTES:
            raise strict  # Its conversion would hold three copies.
        text = body if encoding == "utf-8" else body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        if text is not body:
            _check_shape(text)
        return Claims(text, *_decoded(_with_plain_values(text)), is_lenient=True)
    except RecursionError:
        raise strict from None
    except (msgspec.DecodeError, UnicodeError):
        return None


def _with_plain_values(text: bytes) -> bytearray:
    r"""Return the same JSON with strict values of equal length in place of NaN, Infinity and lone surrogates.

    `\ud…` becomes `\uc…`, whose letters are in none of our keys: a lone surrogate becomes one letter, a pair two.
    """
    plain_text = bytearray(text)
    for odd, plain in ((b"NaN", b"0.0"), (b"Infinity", b"0.000000"), (rb"\ud", rb"\uc"), (rb"\uD", rb"\uc")):
        # In pieces that overlap by a match, so that a large body is copied once and not twice.
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
    """Raise InvalidRequest for a body with too many or too deep objects to build, here or in the engine."""
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

    Removes escaped quotes, then splits at quotes: every second piece is a string. Each pass is in C, over a piece at a
    time, so that a large body is not copied as a whole.
    """
    outside: list[bytes] = []
    quotes = start = 0
    while start < len(body):
        end = min(start + LARGE_BYTES, len(body))
        if body[end - 1 : end] == b"\\":  # An escape must not be cut in two.
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
    """Return the number of values in the fields that may hold token ids and hold only numbers, or lists of them."""
    try:
        fields = _leniently(_FIELDS.decode, body)
    except _UNREADABLE:
        return 0
    return sum(map(_num_numbers, (fields.prompt, fields.input, fields.tokens)))


def _num_numbers(spelled: msgspec.Raw) -> int:
    """Return the number of commas in a list of numbers, or of lists of numbers; 0: the value is something else."""
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
    """Remove the innermost pairs of brackets DEPTH_MAX times. Raises InvalidRequest if pairs are left."""
    brackets = structure.translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            return  # The rest has no pairs: the decoder reports the place.
        brackets = shorter
    if brackets:
        raise InvalidRequest("invalid JSON: nested too deeply")


def _explained(body: bytes, exc: Exception) -> InvalidRequest:
    """Return a fault in a client's terms: line, column, and the missing or extra comma.

    The two bodies printed in the EP are not valid JSON. They are refused rather than repaired.
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
