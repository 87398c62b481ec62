/** Objects of the client: the client, its contexts, one context, one streamed answer. */
import createClient, { type Client } from "openapi-fetch";
import type { paths } from "./api.js";
import { BrokenStream, ContextCacheError, NotCreated, NotUnderstood } from "./errors.js";
import { eventsOf, replyOf, type Event, type Reply } from "./reply.js";
import { placeOf, retrying, type Options } from "./transport.js";
import type { ContextInfo, ListedContext, Message, Prompt, Schemas } from "./types.js";

/** Options of each create and turn. Fields of the engine that this type does not name go into `extra`. */
interface CallOptions {
  temperature?: number;
  top_p?: number;
  stop?: string | string[];
  seed?: number;
  tools?: Record<string, unknown>[];
  tool_choice?: unknown;
  /** More fields of the body. */
  extra?: Record<string, unknown>;
  /** Your own name of the request. Default: a random one, so that a retry runs once. */
  idempotencyKey?: string;
  /** More headers of the request. */
  headers?: Record<string, string>;
  /** Ends the call. A turn that is ended before its answer is complete is not committed. */
  signal?: AbortSignal;
}

type TurnFields = "max_tokens" | "context_mode" | "context_commit" | "truncation" | "kv_hints";
type CreateFields = "max_tokens" | "session_id" | "ttl" | "ttl_policy" | "mode" | "metadata" | "kv_hints";

/** Options of a turn. */
export type TurnOptions = Pick<Schemas["ChatCompletion"], TurnFields> &
  CallOptions & {
    /** Run only on this generation. Throws ApiError with `generation_mismatch` on any other. */
    ifMatch?: number;
  };

/** Options of a create: `messages` or `prompt`, and the terms of the context. */
export type CreateOptions = { model: string } & Pick<Schemas["CreateFromMessages"], CreateFields> &
  CallOptions &
  ({ messages: Message[]; prompt?: never } | { prompt: Prompt; messages?: never });

/** Options of a fork. `session_id`: name of the new context. */
export type ForkOptions = NonNullable<Body<"/v1/context/{session_id}/fork">>;
/** Options of a compaction: `messages` or `prompt`, or none of them for a summary by the model. */
export type CompactOptions = NonNullable<Body<"/v1/context/{session_id}/compact">>;
type Changes = NonNullable<Body<"/v1/context/{session_id}", "patch">>;
type Body<Path extends keyof paths, Method extends "post" | "patch" = "post"> = paths[Path] extends {
  [method in Method]: { requestBody?: { content: { "application/json": infer Content } } };
}
  ? Content
  : never;

interface Call {
  path: "/v1/context" | "/v1/completions" | "/v1/chat/completions";
  body: Record<string, unknown>;
  headers: Record<string, string>;
  signal: AbortSignal | undefined;
}

/** A client of one deployment, with one API key. Calls may run in parallel. */
export class ContextCache {
  readonly contexts: Contexts;
  /**
   * Every call of the OpenAPI document by its path. Each resolves to `data` with a successful answer, else throws as the
   * other calls do: ApiError, ConnectionFailed.
   */
  readonly api: Client<paths>;

  /** Throws TypeError without a URL or key. */
  constructor(options: Options = {}) {
    const { baseUrl, apiKey } = placeOf(options);
    this.api = createClient<paths>({
      baseUrl,
      fetch: retrying(options),
      headers: { authorization: `Bearer ${apiKey}` },
    });
    this.contexts = new Contexts(this);
  }
}

/** The contexts of the key's tenant. */
export class Contexts {
  private readonly client: ContextCache;

  constructor(client: ContextCache) {
    this.client = client;
  }

  /** Create a context and answer its first prompt. `context.reply` has the answer. Throws ApiError, NotCreated. */
  async create(options: CreateOptions): Promise<Context> {
    const reply = await whole(this.client.api, created(options));
    if (reply.sessionId === null) throw new NotCreated(reply);
    return new Context(this.client, reply.sessionId, options.model, { reply });
  }

  /** Create a context and stream the answer. `stream.context` is set before the first event. */
  createStream(options: CreateOptions): ReplyStream {
    return new ReplyStream(this.client, created(options), options.model);
  }

  /** Return an existing context. Throws ApiError with `context_not_found`, `context_expired`. */
  async get(sessionId: string): Promise<Context> {
    const info = await read(this.client.api, sessionId);
    return new Context(this.client, sessionId, info.model, { info });
  }

  /** Yield all contexts, newest first, and read each page on demand. Contexts created meanwhile are not listed. */
  async *list({ model }: { model?: string } = {}): AsyncGenerator<ListedContext, void> {
    const asked = new Set<string | undefined>();
    for (let after: string | undefined; !asked.has(after); ) {
      asked.add(after);
      const query = { limit: 100, ...(after !== undefined && { after }), ...(model !== undefined && { model }) };
      const page = await understood(this.client.api.GET("/v1/context", { params: { query } }));
      yield* page.data as ListedContext[];
      if (!page.has_more) return;
      after = page.last_id ?? undefined;
    }
    throw new NotUnderstood("the server's list repeats itself");
  }

  /** Delete a context and its KV. Throws ApiError with `context_not_found`. */
  async delete(sessionId: string): Promise<void> {
    await understood(this.client.api.DELETE("/v1/context/{session_id}", at(sessionId)));
  }
}

/** One context. A turn sends only its new text. */
export class Context {
  readonly sessionId: string;
  readonly model: string;
  /** The last answer that this object received; undefined before the first one. */
  lastReply: Reply | undefined;
  /** The context at its last read. */
  info: ContextInfo | undefined;
  private readonly client: ContextCache;

  constructor(
    client: ContextCache,
    sessionId: string,
    model: string,
    { reply, info }: { reply?: Reply; info?: ContextInfo } = {},
  ) {
    this.client = client;
    this.sessionId = sessionId;
    this.model = model;
    this.lastReply = reply;
    this.info = info;
  }

  /** The last answer that this object received. Throws Error before the first one. */
  get reply(): Reply {
    if (this.lastReply === undefined) throw new Error(`${this.sessionId} has answered nothing here: ask or chat first`);
    return this.lastReply;
  }

  /** Continue with text, or token ids. */
  async ask(prompt: Prompt, options: TurnOptions = {}): Promise<Reply> {
    return (this.lastReply = await whole(this.client.api, this.asked(prompt, options)));
  }

  /** Continue with a user's message, or with messages. */
  async chat(said: string | Message[], options: TurnOptions = {}): Promise<Reply> {
    return (this.lastReply = await whole(this.client.api, this.said(said, options)));
  }

  /** Continue as `ask` does, and stream the answer. */
  askStream(prompt: Prompt, options: TurnOptions = {}): ReplyStream {
    return new ReplyStream(this.client, this.asked(prompt, options), this.model, this);
  }

  /** Continue as `chat` does, and stream the answer. */
  chatStream(said: string | Message[], options: TurnOptions = {}): ReplyStream {
    return new ReplyStream(this.client, this.said(said, options), this.model, this);
  }

  /** Read the context: turns, tokens, bytes, location of its KV. */
  async refresh(): Promise<ContextInfo> {
    return (this.info = await read(this.client.api, this.sessionId));
  }

  /** Change the ttl (counted from now), its policy, or the metadata, which are replaced as a whole. */
  async update(body: Changes): Promise<void> {
    await understood(this.client.api.PATCH("/v1/context/{session_id}", { ...at(this.sessionId), body }));
  }

  /** Return a new context with the turns of this one, up to a generation. */
  async fork(body: ForkOptions = {}): Promise<Context> {
    const call = this.client.api.POST("/v1/context/{session_id}/fork", { ...at(this.sessionId), body });
    const { session_id, model } = await understood(call);
    return new Context(this.client, session_id, model);
  }

  /** Return a short context that continues this one: with your messages or text, or a summary by the model. */
  async compact(body: CompactOptions = {}): Promise<Context> {
    const call = this.client.api.POST("/v1/context/{session_id}/compact", { ...at(this.sessionId), body: body as never });
    const { session_id, model } = await understood(call);
    return new Context(this.client, session_id, model);
  }

  /** Rewind the context to a generation. Throws ApiError with `generation_gone`. */
  async rewind(generation: number): Promise<void> {
    const call = { ...at(this.sessionId), body: { generation } };
    await understood(this.client.api.POST("/v1/context/{session_id}/rewind", call));
    this.lastReply = undefined;
  }

  /** Delete the context and its KV. */
  async delete(): Promise<void> {
    await this.client.contexts.delete(this.sessionId);
  }

  private asked(prompt: Prompt, options: TurnOptions): Call {
    return turn("/v1/completions", { model: this.model, session_id: this.sessionId, prompt }, options);
  }

  private said(said: string | Message[], options: TurnOptions): Call {
    const messages = typeof said === "string" ? [{ role: "user", content: said }] : said;
    return turn("/v1/chat/completions", { model: this.model, session_id: this.sessionId, messages }, options);
  }
}

/** A streamed answer: iterate once, or take `whole()`. A loop that leaves it early ends the turn uncommitted. */
export class ReplyStream implements AsyncIterable<Event> {
  /** The context; for a create undefined before the first event, and if the server stored none. */
  context: Context | undefined;
  private readonly client: ContextCache;
  private readonly model: string;
  private readonly events: AsyncGenerator<Event, void>;
  private reply: Reply | undefined;

  constructor(client: ContextCache, call: Call, model: string, context?: Context) {
    this.client = client;
    this.model = model;
    this.context = context;
    this.events = this.read(call);
  }

  /** Yield events; the last one is `Finished`. Throws ApiError, BrokenStream, ConnectionFailed, NotCreated. */
  [Symbol.asyncIterator](): AsyncGenerator<Event, void> {
    return this.events;
  }

  /** Read to the end and return the whole answer. */
  async whole(): Promise<Reply> {
    for await (const _ of this.events);
    if (this.reply === undefined) throw new BrokenStream("the stream was left before the answer ended", "");
    return this.reply;
  }

  private async *read({ path, body, headers, signal }: Call): AsyncGenerator<Event, void> {
    const isCreate = this.context === undefined;
    const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
    const { data, response } = await this.client.api.POST(path, {
      body: streamed as never,
      headers,
      parseAs: "stream",
      ...(signal && { signal }),
    });
    const sessionId = response.headers.get("x-session-id");
    if (isCreate && sessionId !== null) this.context = new Context(this.client, sessionId, this.model);
    for await (const event of eventsOf(data as ReadableStream<Uint8Array>, response.headers)) {
      if (event.type === "finished") this.finish(event.reply, isCreate);
      yield event;
    }
  }

  private finish(reply: Reply, isCreate: boolean): void {
    if (isCreate && reply.sessionId === null) {
      this.context = undefined;
      throw new NotCreated(reply);
    }
    this.reply = reply;
    if (reply.sessionId !== null) this.context ??= new Context(this.client, reply.sessionId, this.model);
    if (this.context !== undefined) this.context.lastReply = reply;
  }
}

function created({ model, messages, prompt, ...options }: CreateOptions): Call {
  return turn("/v1/context", { model, ...(messages === undefined ? { prompt } : { messages }) }, options);
}

function turn(path: Call["path"], said: Record<string, unknown>, options: TurnOptions): Call {
  const { extra, idempotencyKey = crypto.randomUUID(), ifMatch, headers, signal, ...fields } = options;
  // The key makes a turn repeatable. A turn that commits nothing runs again, which changes nothing.
  const named: Record<string, string> = { ...headers, "idempotency-key": idempotencyKey };
  if (ifMatch !== undefined) named["if-match"] = String(ifMatch);
  return { path, body: { ...said, ...fields, ...extra }, headers: named, signal };
}

async function whole(api: Client<paths>, { path, body, headers, signal }: Call): Promise<Reply> {
  const answer = api.POST(path, { body: body as never, headers, ...(signal && { signal }) });
  const data = await understood<Record<string, unknown>>(answer as never);
  return replyOf(data, (await answer).response.headers);
}

async function read(api: Client<paths>, sessionId: string): Promise<ContextInfo> {
  const info = await understood(api.GET("/v1/context/{session_id}", at(sessionId)));
  if (info.object === "kept") throw new TypeError("a kept conversation is no context: read it with `api.GET`");
  return info;
}

/** Return the JSON object of a successful answer. Throws NotUnderstood for any other body. */
async function understood<T>(answer: Promise<{ data?: T; response: Response }>): Promise<T> {
  try {
    const { data } = await answer;
    if (typeof data === "object" && data !== null) return data;
  } catch (error) {
    if (error instanceof ContextCacheError || !(error instanceof SyntaxError)) throw error;
  }
  throw new NotUnderstood("the answer is not from context-cache: check the URL");
}

function at(sessionId: string) {
  return { params: { path: { session_id: sessionId } } };
}
