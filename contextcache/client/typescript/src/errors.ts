/** Errors of the client: each is a `ContextCacheError`. */
import type { components } from "./api.js";
import type { Reply } from "./reply.js";

/** Codes of docs/reference/errors.md. An answer may have a code that this release does not know. */
export type ErrorCode = components["schemas"]["ErrorCode"];

/** Base of every error of this client. */
export class ContextCacheError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/**
 * No answer came in time, after all retries. The server may have run the request.
 *
 * Sending a create or a turn again under the same idempotency key is safe: it runs once.
 */
export class ConnectionFailed extends ContextCacheError {}

/** The answer is not of this API: another program answers at the URL, or a far newer release. */
export class NotUnderstood extends ContextCacheError {}

/**
 * A streamed answer ended early. Its turn is not committed, unless only the end of the stream was lost.
 *
 * Before you repeat the turn, read the context's generation, or repeat it under the same idempotency key.
 */
export class BrokenStream extends ContextCacheError {
  /** The text that had arrived. */
  readonly text: string;

  constructor(message: string, text: string, options?: ErrorOptions) {
    super(message, options);
    this.text = text;
  }
}

/** The server answered a create but stored no context. `reply.usage.context.reason` has the reason. */
export class NotCreated extends ContextCacheError {
  readonly reply: Reply;

  constructor(reply: Reply) {
    super("the server answered but stored no context");
    this.reply = reply;
  }
}

/** The server answered with an error. */
export class ApiError extends ContextCacheError {
  /** HTTP status; of an error event in a stream its code if that is a number, else 500. */
  readonly status: number;
  /** Code of the error; empty if the answer has none. */
  readonly code: ErrorCode | (string & {});
  /** Field of the request at fault. */
  readonly param: string | undefined;
  /** Id of the request in the server's logs. */
  readonly requestId: string;
  /** Seconds to wait before a retry; undefined if the answer has no `Retry-After`. */
  readonly retryAfterSeconds: number | undefined;
  /** The whole JSON body; undefined if the body is not JSON. */
  readonly body: unknown;

  constructor(status: number, body: unknown, headers: Headers) {
    const error = objectOf(objectOf(body).error);
    super(typeof error.message === "string" ? error.message : `the server answered with HTTP status ${status}`);
    this.status = status;
    this.code = error.code == null ? "" : String(error.code);
    this.param = typeof error.param === "string" ? error.param : undefined;
    this.requestId = headers.get("x-request-id") ?? "";
    this.retryAfterSeconds = retryAfterSeconds(headers);
    this.body = body;
  }
}

/** Return the seconds of `Retry-After`. A date, which the gateway never sends, counts as absent. */
function retryAfterSeconds(headers: Headers): number | undefined {
  const text = headers.get("retry-after");
  return text !== null && /^\d+(\.\d+)?$/.test(text) ? Number(text) : undefined;
}

/** Return a value as an object to look into; an empty one if it is none. */
export function objectOf(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
}
