"""The commands. Each makes a call or two of `contextcache.client` and prints the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from contextcache.cli import completion, output
from contextcache.cli.completion import Id, Ids, Model
from contextcache.cli.examine import doctor
from contextcache.cli.options import Json, MaxTokens, Option, Temperature, Ttl, key_in, pair, seconds
from contextcache.cli.place import NotConfigured, find_place, write_place
from contextcache.cli.release import own_version
from contextcache.cli.serve import PARTS, start
from contextcache.client import ContextCache, ReplyStream, TextDelta
from contextcache.client.errors import ApiError, ClientError, NoReadyEndpoint, NotCreated
from contextcache.client.types import ContextInfo

OK, REFUSED, MISUSED, UNREACHABLE = 0, 1, 2, 3
"""Exit codes.

OK: done. REFUSED: the server refused, or the reader of the output closed it. MISUSED: the command line is wrong, or URL
and key are missing. UNREACHABLE: no answer, an answer of another program, or an interrupted one. Ctrl-C: 130.
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Work with the contexts of a deployment. The server and the key come from --url and "
    "--api-key-file, from CONTEXT_CACHE_URL and CONTEXT_CACHE_API_KEY, or from `context-cache login`.",
)


class _Asked:
    """Options before the command."""

    url: str | None = None
    key_file: Path | None = None


_asked = _Asked()


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer's
    if wanted:
        typer.echo(f"context-cache {own_version()}")
        raise typer.Exit


@app.callback()
def _options(
    url: Annotated[str | None, Option(help="URL of the server, such as https://llm.example.org.")] = None,
    api_key_file: Annotated[Path | None, Option(help="File with the API key.")] = None,
    version: Annotated[  # noqa: ARG001  # a flag, which prints and ends
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    _asked.url, _asked.key_file = url, api_key_file


@contextmanager
def _client() -> Iterator[ContextCache]:
    url, key = find_place(_asked.url, key_in(_asked.key_file) if _asked.key_file else None)
    try:
        client = ContextCache(url, key)
    except ValueError as exc:
        raise NotConfigured(str(exc)) from exc
    with client:
        yield client


@app.command(epilog="Example: context-cache login https://llm.example.org < key")
def login(url: Annotated[str, typer.Argument(help="URL of the server.")]) -> None:
    """Store a server and its key for later commands.

    The key comes from a prompt or from stdin. Only you can read the file.
    """
    key = typer.prompt("API key", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
    try:
        with ContextCache(url, key.strip()) as client:
            names = client.models()
    except NoReadyEndpoint:
        names = []  # keys are checked before pods: the key is right, and an engine still loads
    except ValueError as exc:
        raise NotConfigured(str(exc)) from exc
    file = write_place(url, key.strip())
    output.say(f"{url} serves {', '.join(names) or 'no model yet'}; stored in {file}")


@app.command(epilog="Example: context-cache models")
def models(json: Json = False) -> None:
    """List the served models."""
    with _client() as client:
        for name in client.models():
            output.print_json({"id": name}) if json else typer.echo(output.plain(name))


@app.command(name="ls", epilog="Example: context-cache ls --model llama --limit 20")
def list_(
    model: Annotated[
        str | None, Option(help="List only contexts of this model.", autocompletion=completion.models)
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of lines. 0: all.")] = 100,
    kept: Annotated[bool, typer.Option("--kept", help="List kept conversations instead of contexts.")] = False,
    json: Json = False,
) -> None:
    """List contexts, newest first."""
    with _client() as client:
        listed: Iterator[Any] = client.contexts.list_kept() if kept else client.contexts.list(model=model)
        found = islice(listed, limit or None)
        if json:
            for one in found:
                output.print_json(dict(one.raw))
            return
        heads, row = (output.KEPT_HEADS, output.kept_row) if kept else (output.CONTEXT_HEADS, output.context_row)
        if not output.print_rows(heads, map(row, found)):
            output.say("none")


@app.command(epilog="Example: context-cache show ctx_3f2a…")
def show(session_id: Id, json: Json = False) -> None:
    """Describe one context and its last turns."""
    with _client() as client:
        _print_info(client.contexts.get(session_id).info, json=json)


@app.command(epilog="Example: context-cache create smollm2-135m-instruct 'Say this is a test' --ttl 1h")
def create(  # noqa: PLR0913  # its options
    model: Model,
    prompt: Annotated[str, typer.Argument(help="First prompt. - reads stdin.")],
    name: Annotated[str | None, Option(help="Name of the context. Without it the server makes one.")] = None,
    ttl: Ttl = None,
    sliding: Annotated[bool, typer.Option("--sliding", help="Start the life again with each turn.")] = False,
    metadata: Annotated[
        list[str] | None,
        Option(metavar="KEY=VALUE", help="Metadata of the context. May be repeated."),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    json: Json = False,
) -> None:
    """Create a context and answer its first prompt."""
    policy, said = "sliding" if sliding else None, dict(map(pair, metadata or ())) or None
    fields = _given(
        max_tokens=max_tokens, temperature=temperature, ttl=ttl, ttl_policy=policy, session_id=name, metadata=said
    )
    with _client() as client:
        _answer(client.contexts.create_stream(model, _text(prompt), **fields), json=json)


@app.command(epilog="Example: context-cache ask ctx_3f2a… ' And again'")
def ask(
    session_id: Id,
    prompt: Annotated[str, typer.Argument(help="Text of the turn, without the previous ones. - reads stdin.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    json: Json = False,
) -> None:
    """Continue a context with text."""
    with _client() as client:
        context = client.contexts.get(session_id)
        _answer(context.ask_stream(_text(prompt), **_given(max_tokens=max_tokens, temperature=temperature)), json=json)


@app.command(epilog="Example: context-cache chat ctx_3f2a…   (an empty line ends it)")
def chat(
    session_id: Id,
    said: Annotated[
        str | None, typer.Argument(help="Message to send. Without it: one message per line.", show_default=False)
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    json: Json = False,
) -> None:
    """Continue a context as a chat."""
    fields = _given(max_tokens=max_tokens, temperature=temperature)
    with _client() as client:
        context = client.contexts.get(session_id)
        if said is not None:
            _answer(context.chat_stream(_text(said), **fields), json=json)
            return
        while line := _line():
            _answer(context.chat_stream(line, **fields), json=json)


@app.command(epilog="Example: context-cache usage --first-day 2026-11-01")
def usage(
    first_day: Annotated[
        str | None,
        Option(metavar="YYYY-MM-DD", help="First day, in UTC. Default: the last day."),
    ] = None,
    last_day: Annotated[str | None, Option(metavar="YYYY-MM-DD", help="Last day, in UTC. Default: today.")] = None,
    tenant: Annotated[str | None, Option(help="Name of another tenant. Needs an operator's key.")] = None,
    json: Json = False,
) -> None:
    """Show usage by day and API key."""
    with _client() as client:
        found = client.usage(first_day=first_day, last_day=last_day, tenant=tenant)
    if json:
        output.print_json(found)
    elif not output.print_rows(output.USAGE_HEADS, output.usage_rows(found)):
        output.say("nothing")


@app.command(epilog="Example: context-cache extend ctx_3f2a… 1d")
def extend(
    session_id: Id,
    ttl: Annotated[
        int, typer.Argument(parser=seconds, metavar="TIME", help="New life from now: seconds, 90s, 30m, 1h or 7d.")
    ],
    json: Json = False,
) -> None:
    """Set a new life for a context."""
    with _client() as client:
        _print_info(client.contexts.update(session_id, ttl=ttl), json=json)


@app.command(epilog="Example: context-cache fork ctx_3f2a… --generation 3")
def fork(
    session_id: Id,
    generation: Annotated[int | None, Option(help="Generation to start from. Default: the newest.")] = None,
    name: Annotated[str | None, Option(help="Name of the fork. Without it the server makes one.")] = None,
    ttl: Ttl = None,
    json: Json = False,
) -> None:
    """Create a context that begins with the turns of another."""
    with _client() as client:
        branch = client.contexts.fork(session_id, generation=generation, name=name, ttl=ttl)
        _print_info(branch.info, json=json)


@app.command(epilog="Example: context-cache compact ctx_3f2a… --instructions 'Keep all names.'")
def compact(
    session_id: Id,
    prompt: Annotated[str | None, typer.Argument(help="Short text instead of a summary. - reads stdin.")] = None,
    instructions: Annotated[str | None, Option(help="Further instructions for the summary.")] = None,
    name: Annotated[str | None, Option(help="Name of the new context. Without it the server makes one.")] = None,
    ttl: Ttl = None,
    max_tokens: MaxTokens = None,
    json: Json = False,
) -> None:
    """Create a short context that continues another."""
    fields = _given(prompt=prompt and _text(prompt), instructions=instructions, ttl=ttl, max_tokens=max_tokens)
    with _client() as client:
        _print_info(client.contexts.compact(session_id, name=name, **fields).info, json=json)


@app.command(epilog="Example: context-cache rewind ctx_3f2a… 3")
def rewind(
    session_id: Id,
    generation: Annotated[int, typer.Argument(help="Generation to go back to.")],
    json: Json = False,
) -> None:
    """Rewind a context to an earlier turn."""
    with _client() as client:
        _print_info(client.contexts.rewind(session_id, generation), json=json)


@app.command(epilog="Example: context-cache rm ctx_3f2a… ctx_91bc…")
def rm(
    session_ids: Ids,
    json: Json = False,
) -> None:
    """Delete contexts and their KV.

    One failed delete does not stop the others, but makes the command fail.
    """
    failures: list[ApiError] = []
    with _client() as client:
        for session_id in session_ids:
            try:
                client.contexts.delete(session_id)
            except ApiError as exc:
                failures.append(exc)
                output.say(f"{session_id}: {output.fault(exc)}")
            else:
                output.print_json({"session_id": session_id, "deleted": True}) if json else output.say(
                    f"{session_id}: deleted"
                )
    if failures:
        raise typer.Exit(REFUSED)


app.command(epilog="Example: context-cache doctor --url https://llm.example.org --api-key-file key --story")(doctor)
_serve = typer.Typer(
    no_args_is_help=True, help="Start a process of a deployment. Needs the package context-cache-server."
)
app.add_typer(_serve, name="serve")


def _add_part(name: str) -> None:
    # Every word after the part's name belongs to the part, --help too.
    words = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @_serve.command(name, help=PARTS[name].purpose, context_settings=words)
    def part(context: typer.Context) -> None:
        raise typer.Exit(start(name, context.args))


for _name in PARTS:
    _add_part(_name)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code, or raise SystemExit with it, as typer does."""
    try:
        app(arguments, prog_name="context-cache")
    except NotConfigured as exc:
        output.say(str(exc))
        return MISUSED
    except ClientError as exc:
        output.say(output.fault(exc))
        return REFUSED if isinstance(exc, ApiError) else UNREACHABLE
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as exc:
        output.say(str(exc))
        return MISUSED
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as exc:
        output.say(f"the server's answer is not valid ({type(exc).__name__})")
        return UNREACHABLE
    return OK


def _answer(stream: ReplyStream, *, json: bool) -> None:
    """Print an answer as it arrives."""
    with stream:
        try:
            for event in stream:
                if isinstance(event, TextDelta) and not json:
                    typer.echo(output.plain(event.text), nl=False)
                    sys.stdout.flush()
            reply = stream.reply()
        except NotCreated as exc:
            reply = exc.reply
    if json:
        output.print_json(dict(reply.raw))
    else:
        typer.echo()
        output.say(output.receipt(reply))
    if not reply.usage.context.committed:
        raise typer.Exit(REFUSED)


def _print_info(info: ContextInfo | None, *, json: bool) -> None:
    assert info is not None, "it was read"
    if json:
        output.print_json(dict(info.raw))
        return
    output.console().print(output.fields(output.shown(info)))
    if info.recent_turns:
        output.console().print()
        output.print_rows(output.TURN_HEADS, output.turn_rows(info.recent_turns))


def _given(**options: object) -> Any:
    """Return the options that the command line has."""
    return {name: value for name, value in options.items() if value is not None}


def _text(said: str) -> str:
    return sys.stdin.read() if said == "-" else said


def _line() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt(">", prompt_suffix=" ", default="", show_default=False))
    return sys.stdin.readline().rstrip("\n")
