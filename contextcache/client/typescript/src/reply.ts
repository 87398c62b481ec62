/** A whole answer, and a streamed one as typed events. */
import { createParser } from "eventsource-parser";
import { ApiError, BrokenStream, ContextCacheError, objectOf } from "./errors.js";
import { reasonOf } from "./transport.js";
import type { ContextUsage, Usage } from "./types.js";

type Json = Record<string, unknown>;

/** Size limit of one event: no engine sends as much, and another kind of body must not fill the memory. */
const EVENT_CHARS_MAX = 8 << 20;

/** One whole answer. */
export interface Reply {
  text: string;
  finishReason: string | null;
  /** Tool calls, as OpenAI has them. */
  toolCalls: Json[];
  /** `usage.context.cached_tokens`: prompt tokens that were not computed. Zeros if the server sent no usage. */
  usage: Usage;
  /** Context of the answer; null if its create was not committed. */
  sessionId: string | null;
  /** Unix seconds. */
  expiresAt: number | null;
  /** Generation of the context after this turn; null without a receipt, or if the commit was refused. */
  generation: number | null;
  /** Whether the server had answered this request before. */
  isReplayed: boolean;
  headers: Headers;
  /** The JSON object; for a streamed answer its last chunk. */
  raw: Json;
}

/** A piece of the answer's text. */
export interface TextDelta {
  type: "text";
  text: string;
}

/** A piece of a tool call, as OpenAI has it: `raw.function.arguments` is a piece of JSON. */
export interface ToolCallDelta {
  type: "tool_call";
  index: number;
  raw: Json;
}

/** The whole answer, after the commit. */
export interface Finished {
  type: "finished";
  reply: Reply;
}

export type Event = TextDelta | ToolCallDelta | Finished;

/** Read the JSON of a whole answer, of a completion or of a chat. */
export function replyOf(raw: Json, headers: Headers): Reply {
  const choice = objectOf(listOf(raw.choices)[0]);
  const message = objectOf(choice.message);
  const usage = usageOf(raw.usage as Partial<Usage> | null | undefined);
  const generation = headers.get("x-context-generation");
  // The head of a stream holds the planned generation.
  const isRefused = !usage.context.committed && usage.context.reason !== "read_only" && hasContext(raw.usage);
  return {
    text: String(choice.text ?? message.content ?? ""),
    finishReason: (choice.finish_reason as string | null | undefined) ?? null,
    toolCalls: listOf(message.tool_calls),
    usage,
    sessionId: raw.session_id === undefined ? headers.get("x-session-id") : (raw.session_id as string | null),
    expiresAt: (raw.expires_at as number | null | undefined) ?? null,
    generation: generation === null || isRefused ? null : Number(generation),
    isReplayed: headers.get("idempotent-replayed") === "true",
    headers,
    raw,
  };
}

/** Yield the events of a streamed answer; the last one is `Finished`. Throws ApiError, BrokenStream. */
export async function* eventsOf(body: ReadableStream<Uint8Array>, headers: Headers): AsyncGenerator<Event, void> {
  const answer = new StreamedAnswer();
  const decoder = new TextDecoder();
  const arrived: string[] = [];
  // Once a part exceeds the limit, `feed` throws.
  const parser = createParser({ onEvent: ({ data }) => arrived.push(data), maxBufferSize: EVENT_CHARS_MAX });
  try {
    for await (const bytes of body) {
      parser.feed(decoder.decode(bytes, { stream: true }));
      for (const data of arrived.splice(0)) {
        if (data === "[DONE]") {
          yield { type: "finished", reply: replyOf(answer.whole(), headers) };
          return; // bytes after the end do not belong to the answer
        }
        yield* answer.add(chunkOf(data, headers));
      }
    }
  } catch (error) {
    if (error instanceof ContextCacheError) throw error;
    throw new BrokenStream(`the stream broke: ${reasonOf(error)}`, answer.text, { cause: error });
  }
  throw new BrokenStream("the stream ended before the answer was complete", answer.text);
}

function chunkOf(data: string, headers: Headers): Json {
  const chunk = JSON.parse(data) as Json;
  if (chunk.error == null) return chunk;
  const { code } = objectOf(chunk.error);
  throw new ApiError(typeof code === "number" ? code : 500, chunk, headers);
}

/** Chunks of one answer, joined. */
class StreamedAnswer {
  text = "";
  private last: Json = {};
  private usage: unknown;
  private finishReason: unknown;
  private readonly toolCalls = new Map<number, Json & { function: Json }>();

  *add(chunk: Json): Generator<Event> {
    this.last = { ...this.last, ...chunk };
    this.usage = chunk.usage ?? this.usage;
    const choice = objectOf(listOf(chunk.choices)[0]);
    const delta = objectOf(choice.delta);
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const text = choice.text ?? delta.content;
    if (typeof text === "string" && text !== "") {
      this.text += text;
      yield { type: "text", text };
    }
    for (const raw of listOf(delta.tool_calls)) {
      const index = Number(raw.index ?? 0);
      this.join(index, raw);
      yield { type: "tool_call", index, raw };
    }
  }

  whole(): Json {
    const calls = [...this.toolCalls].sort(([one], [other]) => one - other).map(([, call]) => call);
    const choice = { message: { content: this.text, tool_calls: calls }, finish_reason: this.finishReason };
    return { ...this.last, choices: [choice], usage: this.usage };
  }

  private join(index: number, { index: _, function: piece, ...said }: Json): void {
    const joined = this.toolCalls.get(index) ?? { function: { name: "", arguments: "" } };
    for (const [name, value] of Object.entries(said)) if (value) joined[name] = value;
    for (const [name, value] of Object.entries(objectOf(piece))) {
      joined.function[name] = `${joined.function[name] ?? ""}${value ?? ""}`;
    }
    this.toolCalls.set(index, joined);
  }
}

function usageOf(raw: Partial<Usage> | null | undefined): Usage {
  const prompt_tokens = raw?.prompt_tokens ?? 0;
  const none: ContextUsage = {
    computed_tokens: prompt_tokens,
    cached_tokens: 0,
    saved_tokens: 0,
    context_tokens: 0,
    source: "none",
    restore_ms: null,
    committed: false,
  };
  return { total_tokens: 0, ...raw, prompt_tokens, context: raw?.context ?? none };
}

function hasContext(usage: unknown): boolean {
  return objectOf(usage).context != null;
}

function listOf(value: unknown): Json[] {
  return Array.isArray(value) ? value : [];
}
