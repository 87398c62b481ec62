"""One conversation and a model of it that knows nothing of the product: what each turn's prompt must be, and why.

The tiny model has one token for each byte, and conversations in text keep to printable ASCII, so text and ids say the
same and what the engine was given can be compared with what it must have been given. Conversations in ids take any
token the model samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from tests.kit.faults.reference import Answer, Difference, check_usage, compare
from tests.kit.stack import MODEL
from tests.kit.tiny_stack import BLOCK_TOKENS, ENGINE_BLOCK_TOKENS

Kind = Literal["text", "ids", "chat"]
MAX_TOKENS = 1200
"""A conversation that has so many ends."""
MAX_ANSWER_TOKENS = 20
_FIRST_PRINTABLE = ord("!")
_NUM_PRINTABLE = 94
"""The tokenizer's first ids: `!` is 0, `~` is 93."""
_NEWLINE = 198
_END = 511
_EDGES = (ENGINE_BLOCK_TOKENS, BLOCK_TOKENS)
_THRESHOLD = 0.8


@dataclass(frozen=True)
class Piece:
    """One segment of the transcript: what a client said, or an answer."""

    ids: tuple[int, ...]
    messages: tuple[dict[str, str], ...] = ()
    is_answer: bool = False


@dataclass(frozen=True)
class Request:
    """One turn to be asked, and what must follow from it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    max_tokens: int
    prompt: tuple[int, ...]
    """The whole prompt the engine must be given."""
    keeps: int
    """Pieces of the transcript that stay."""
    adds: tuple[Piece, ...]
    context_mode: str
    commits: bool
    told: str
    """For the list of steps."""


@dataclass
class Conversation:
    """The model: pieces of the transcript and the generation; `send` asks the stack, `cold` the engine alone."""

    random: Random
    send: Callable[[Request], Answer]
    cold: Callable[..., Answer]
    kind: Kind
    tenant: str
    mode: str = "session"
    session_id: str = ""
    generation: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        """The transcript as ids."""
        return tuple(token for piece in self.pieces for token in piece.ids)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The transcript as chat messages."""
        return [message for piece in self.pieces for message in piece.messages]

    @property
    def sampling(self) -> dict[str, Any]:
        """What makes answers readable where text matters."""
        return {} if self.kind == "ids" else {"allowed_token_ids": list(range(_NUM_PRINTABLE))}

    def create(self, *, session_id: str = "", like: Request | None = None) -> tuple[Request, Answer]:
        """Make the context. `like`: the same prompt as another conversation's create."""
        request = like or self._create_request(session_id)
        answer = self._ask(request)
        self.session_id = answer.session_id
        if not self.session_id or (session_id and self.session_id != session_id):
            raise Difference(f"session_id {self.session_id!r}, asked for {session_id!r}")
        return request, answer

    def take_turn(self, *, like: Request | None = None) -> tuple[Request, Answer]:
        """Append, replay, extend or diverge at random, and check the answer."""
        request = like or self._turn_request()
        request = replace(request, body=request.body | {"session_id": self.session_id})
        return request, self._ask(request)

    def probe(self) -> tuple[Request, Answer]:
        """Ask something that changes nothing: its prompt shows the whole stored transcript."""
        return self.take_turn(like=self._append(commits=False))

    @property
    def is_long(self) -> bool:
        """Whether it should end."""
        return len(self.ids) > MAX_TOKENS

    # What is asked.

    def _create_request(self, session_id: str) -> Request:
        said = self._fresh(at_least=8)
        body: dict[str, Any] = {"mode": self.mode, "ttl": 3600}
        if session_id:
            body["session_id"] = session_id
        piece = self._piece(said, system=self.random.random() < 0.3)
        max_tokens = 0 if self.random.random() < 0.15 else self._answer_tokens(len(piece.ids))
        return self._request("/v1/context", body, piece.ids, 0, (piece,), "append", max_tokens, told="create")

    def _turn_request(self) -> Request:
        commits = self.random.random() > 0.1
        move = self.random.choices(
            (self._append, self._replay_exact, self._replay_extend, self._diverge), weights=(45, 10, 25, 20)
        )[0]
        return move(commits=commits)

    def _append(self, *, commits: bool) -> Request:
        piece = self._piece(self._fresh())
        given = self._given(piece)
        mode = self.random.choice(("auto", "append"))
        if self.kind == "chat" and not self.pieces[-1].is_answer:
            # A history that ends in a question (a create of no tokens) is rendered as a whole with the next one.
            whole = Piece(rendered([*self.messages, *piece.messages]), (*self.messages, *piece.messages))
            return self._turn(given, whole.ids, 0, (whole,), "append", mode, commits, "append after no answer")
        if self.kind == "chat":
            piece = Piece(_ids("\n") + piece.ids, piece.messages)
        return self._turn(given, self.ids + piece.ids, len(self.pieces), (piece,), "append", mode, commits, "append")

    def _replay_exact(self, *, commits: bool) -> Request:
        if self.kind == "chat":
            return self._replay_chat(self.messages, commits, "replay exact")
        return self._replay(self.ids, commits, "replay exact")

    def _replay_extend(self, *, commits: bool) -> Request:
        new = self._fresh()
        if self.kind == "chat":
            return self._replay_chat([*self.messages, _message("user", new)], commits, "replay extend")
        return self._replay(self.ids + new, commits, "replay extend")

    def _diverge(self, *, commits: bool) -> Request:
        """Repeat the transcript up to anywhere, then go on otherwise."""
        new = self._fresh()
        if self.kind == "chat" and len(self.messages) > 3 and self.random.random() < 0.4:
            return self._trim(commits=commits)
        if self.kind == "chat":
            messages = [dict(message) for message in self.messages]
            at = self.random.randrange(len(messages))
            content = messages[at]["content"]
            cut = content[: self.random.randint(0, len(content))]
            messages[at]["content"] = cut + _text(new)
            kept = messages[: at + 1]
            if kept[-1]["role"] != "user":
                kept.append(_message("user", self._fresh()))
            return self._replay_chat(kept, commits, f"diverge in message {at}")
        at = self.random.randint(0, len(self.ids))
        other = self._unlike(self.ids[at] if at < len(self.ids) else None)
        return self._replay((*self.ids[:at], other, *new), commits, f"diverge at {at}")

    def _trim(self, *, commits: bool) -> Request:
        """Leave out what is old, with or without the beginning: what is sent ends in an answer and a new question."""
        head = self.random.randint(0, 1)
        kept = self.messages[-self.random.randint(1, len(self.messages) - 1 - head) :]
        messages = [*self.messages[:head], *kept, _message("user", self._fresh())]
        return self._replay_chat(messages, commits, f"trim to {head} + {len(kept)}")

    def _replay(self, whole: tuple[int, ...], commits: bool, told: str) -> Request:
        """Completions: the kept pieces are those that `whole` repeats to their end."""
        shared = common(whole, self.ids)
        first = self.pieces[0].ids
        is_found = shared >= len(first) or shared >= _THRESHOLD * len(self.ids)
        keeps = self._whole_pieces(shared) if is_found else 0
        rest = whole[sum(len(piece.ids) for piece in self.pieces[:keeps]) :]
        mode = self.random.choice(("auto", "replay")) if is_found else "replay"
        given = {"prompt": _text(whole) if self.kind == "text" else list(whole)}
        return self._turn(given, whole, keeps, (Piece(rest),) if rest else (), "replay", mode, commits, told)

    def _replay_chat(self, messages: Sequence[dict[str, str]], commits: bool, told: str) -> Request:
        keeps = position = 0
        for piece in self.pieces:
            if list(piece.messages) != list(messages[position : position + len(piece.messages)]):
                break
            position += len(piece.messages)
            keeps += 1
        whole = rendered(messages)
        while keeps and not self.pieces[keeps - 1].is_answer and position < len(messages):
            keeps -= 1  # new messages follow an answer, or are rendered as a whole, see _append
            position -= len(self.pieces[keeps].messages)
        start = sum(len(piece.ids) for piece in self.pieces[:keeps])
        rest = Piece(whole[start:], tuple(messages[position:]))
        shows_history = keeps or any(message["role"] == "assistant" for message in messages[:-1])
        mode = self.random.choice(("auto", "replay")) if shows_history else "replay"
        adds = (rest,) if rest.ids or rest.messages else ()
        return self._turn({"messages": list(messages)}, whole, keeps, adds, "replay", mode, commits, told)

    def _turn(self, given, prompt, keeps, adds, context_mode, mode, commits, told) -> Request:
        body = {**given, "context_mode": mode}
        if not commits:
            body["context_commit"] = False
        path = "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"
        headers = {}
        if self.random.random() < 0.2:
            headers["if-match"] = f'"{self.generation}"'
        max_tokens = self._answer_tokens(len(prompt))
        return self._request(path, body, prompt, keeps, adds, context_mode, max_tokens, commits, headers, told=told)

    def _request(
        self, path, body, prompt, keeps, adds, context_mode, max_tokens, commits=True, headers=None, *, told
    ) -> Request:
        body = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            **({"logprobs": True} if self.kind == "chat" else {"logprobs": 1}),
            **self.sampling,
            **body,
        }
        if path == "/v1/context":
            body |= self._given(adds[0])
        if self.random.random() < 0.4:
            body["stream"] = True
            if self.random.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        told += f" ({self.kind}, {len(prompt)} tokens, answer {max_tokens}{', stream' if 'stream' in body else ''}"
        told += f"{'' if commits else ', no commit'}, {body.get('context_mode', self.mode)})"
        return Request(
            path, body, headers or {}, max_tokens, tuple(prompt), keeps, tuple(adds), context_mode, commits, told
        )

    # What is checked.

    def _ask(self, request: Request) -> Answer:
        answer = self.send(request)
        given = tuple(answer.prompt_ids)
        # A chat stream of no tokens has only the event at its end, and vLLM tells a chat's prompt with the first.
        is_told = request.max_tokens or given
        if is_told and given != request.prompt:
            same = common(given, request.prompt)
            wrong = f"{len(given)} tokens, not {len(request.prompt)}; from {same} on {given[same:][:8]}"
            raise Difference(f"the engine was given {wrong}, not {request.prompt[same:][:8]}")
        if request.max_tokens:
            compare(answer, self.cold(answer.prompt_ids, max_tokens=request.max_tokens, **self.sampling))
        elif answer.text or answer.logprobs:
            raise Difference(f"an answer of no tokens says {answer.text!r}")
        shared = common(request.prompt, self.ids)
        check_usage(
            answer, prompt_tokens=len(request.prompt), context_tokens=shared, prefill_only=not request.max_tokens
        )
        self._check_receipt(request, answer)
        if request.commits and self._is_extended(request):
            self._commit(request, answer)
        return answer

    def _is_extended(self, request: Request) -> bool:
        return request.path == "/v1/context" or self.mode == "session"

    def _check_receipt(self, request: Request, answer: Answer) -> None:
        commits = request.commits and self._is_extended(request)
        committed = answer.usage["context"]["committed"]
        generation = int(answer.headers["x-context-generation"])
        mode = answer.headers["x-context-mode"]
        expected = (commits, self.generation + commits, request.context_mode)
        if (found := (committed, generation, mode)) != expected:
            raise Difference(f"committed, generation, mode {found}, not {expected}: {answer.usage}")

    def _commit(self, request: Request, answer: Answer) -> None:
        self.generation += 1
        self.pieces = [*self.pieces[: request.keeps], *request.adds]
        ids = tuple(answer.token_ids) if request.max_tokens else ()
        if self.kind == "ids" and answer.finish_reason == "stop":
            if ids[-1:] != (_END,):
                raise Difference(f"stopped without the end token: {ids}")
            ids = ids[:-1]
        if ids:
            messages = (_message("assistant", ids),) if self.kind == "chat" else ()
            self.pieces.append(Piece(ids, messages, is_answer=True))

    # Words.

    def _fresh(self, *, at_least: int = 1) -> tuple[int, ...]:
        """Return something never said here: often so long that the whole comes to lie at an edge of a block."""
        length = self.random.randint(at_least, 180)
        if self.random.random() < 0.7:
            edge = self.random.choice(_EDGES)
            before = len(self.ids)
            length = (before + at_least + 2 + edge) // edge * edge + self.random.randint(-2, 2) - before
            length += edge * self.random.choice((0, 0, 0, 1, 3))
        first = self._unlike(self.ids[0] if self.ids else None)
        return (first, *(self._word() for _ in range(max(length, at_least) - 1)))

    def _answer_tokens(self, prompt: int) -> int:
        to_edge = -prompt % self.random.choice(_EDGES)
        if 0 < to_edge <= MAX_ANSWER_TOKENS and self.random.random() < 0.5:
            return to_edge
        return self.random.randint(1, MAX_ANSWER_TOKENS)

    def _word(self) -> int:
        return self.random.randrange(256 if self.kind == "ids" else _NUM_PRINTABLE)

    def _unlike(self, token: int | None) -> int:
        """Return a token other than this one, so that nothing is taken for a replay by chance."""
        while (word := self._word()) == token:
            pass
        return word

    def _piece(self, said: tuple[int, ...], *, system: bool = False) -> Piece:
        if self.kind != "chat":
            return Piece(said)
        half = len(said) // 2 if system else 0
        messages = [_message("system", said[:half])] if system else []
        messages.append(_message("user", said[half:]))
        return Piece(rendered(messages), tuple(messages))

    def _given(self, piece: Piece) -> dict[str, Any]:
        if self.kind == "chat":
            return {"messages": list(piece.messages)}
        return {"prompt": _text(piece.ids) if self.kind == "text" else list(piece.ids)}

    def _whole_pieces(self, shared: int) -> int:
        kept = length = 0
        for piece in self.pieces:
            length += len(piece.ids)
            if length > shared:
                break
            kept += 1
        return kept


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))


def rendered(messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Return what the tiny model's chat template makes of messages, the generation prompt included."""
    return _ids("".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>")


def _message(role: str, ids: Sequence[int]) -> dict[str, str]:
    return {"role": role, "content": _text(ids)}


def _ids(text: str) -> tuple[int, ...]:
    return tuple(_NEWLINE if character == "\n" else ord(character) - _FIRST_PRINTABLE for character in text)


def _text(ids: Sequence[int]) -> str:
    return "".join(chr(token + _FIRST_PRINTABLE) for token in ids)
