/** A `fetch` with a deadline, retries and typed errors, under the calls that the OpenAPI document names. */
import { ApiError, ConnectionFailed } from "./errors.js";

/** A server, and the limits of each call. */
export interface Options {
  /** Default: the environment's `CONTEXT_CACHE_URL`. */
  baseUrl?: string;
  /** Default: the environment's `CONTEXT_CACHE_API_KEY`. */
  apiKey?: string;
  /** Longest silence of the server in milliseconds. Default: 300 000. */
  timeoutMs?: number;
  /** Attempts after the first one, all begun within a minute. Default: 4. */
  retries?: number;
  /** Your own `fetch`, for example one that uses a proxy. */
  fetch?: (request: Request) => Promise<Response>;
}

export interface Place {
  baseUrl: string;
  apiKey: string;
}

const WITHIN_MS = 60_000;
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 8_000;

/** Return the base URL without `/v1`, and the key. Throws TypeError for a missing or wrong one. */
export function placeOf({ baseUrl, apiKey }: Options): Place {
  const environment = (globalThis as { process?: { env?: Record<string, string | undefined> } }).process?.env ?? {};
  const url = baseUrl ?? environment.CONTEXT_CACHE_URL ?? "";
  const key = apiKey ?? environment.CONTEXT_CACHE_API_KEY ?? "";
  if (!/^https?:\/\//.test(url)) {
    throw new TypeError("no server URL: pass `baseUrl` or set CONTEXT_CACHE_URL, as http://gateway:8000");
  }
  const parsed = new URL(url);
  if (parsed.username !== "" || parsed.password !== "") {
    throw new TypeError("`baseUrl` must not contain a user or password: error messages show it");
  }
  if (!/^[\x20-\x7e]+$/.test(key)) {
    throw new TypeError("no API key: pass `apiKey` or set CONTEXT_CACHE_API_KEY (printable ASCII)");
  }
  return { baseUrl: url.replace(/\/+$/, "").replace(/\/v1$/, ""), apiKey: key };
}

/**
 * Return a `fetch` that answers with a successful response only.
 *
 * It throws ApiError for any other response, and ConnectionFailed without one. It retries in two cases:
 *
 * - The response has `Retry-After`. After a 409 or 429 each request is sent again, because it had no effect. After a 503
 *   only a request whose repetition changes nothing is sent again.
 * - The connection failed, and repeating the request changes nothing.
 */
export function retrying({ timeoutMs = 300_000, retries = 4, fetch = globalThis.fetch }: Options) {
  return async (request: Request): Promise<Response> => {
    const beganMs = Date.now();
    for (let sent = 1; ; sent += 1) {
      const failure = await attempt(request.clone(), fetch, timeoutMs);
      if (failure instanceof Response) return failure;
      const isRetried = sent <= retries && mayRepeat(request, failure);
      const askedMs = failure instanceof ApiError ? (failure.retryAfterSeconds ?? 0) * 1000 : 0;
      const waitMs = Math.max(askedMs, Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (sent - 1)) * jitter());
      if (!isRetried || Date.now() - beganMs + waitMs > WITHIN_MS) throw failure;
      await waited(waitMs, request.signal);
    }
  };
}

function mayRepeat(request: Request, failure: ApiError | ConnectionFailed): boolean {
  const isRepeatable = ["GET", "PATCH"].includes(request.method) || request.headers.has("idempotency-key");
  if (!(failure instanceof ApiError)) return isRepeatable;
  if (failure.retryAfterSeconds === undefined) return false;
  return failure.status === 409 || failure.status === 429 || (failure.status === 503 && isRepeatable);
}

/** Send a request once. Throws the reason of the caller's own signal. */
async function attempt(
  request: Request,
  fetch: NonNullable<Options["fetch"]>,
  timeoutMs: number,
): Promise<Response | ApiError | ConnectionFailed> {
  const abort = new AbortController();
  const signal = AbortSignal.any([request.signal, abort.signal]);
  try {
    const response = watched(await within(fetch(new Request(request, { signal })), timeoutMs, abort), timeoutMs, abort);
    return response.ok ? response : new ApiError(response.status, await jsonOf(response), response.headers);
  } catch (error) {
    request.signal.throwIfAborted();
    const { origin } = new URL(request.url);
    return new ConnectionFailed(`no answer from ${origin}: ${reasonOf(error)}`, { cause: error });
  }
}

/** Return the response with a body that fails after a silence of `timeoutMs`, counted only while a reader waits. */
function watched(response: Response, timeoutMs: number, abort: AbortController): Response {
  const reader = response.body?.getReader();
  if (reader === undefined) return response;
  const body = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const { done, value } = await within(reader.read(), timeoutMs, abort);
        if (done) controller.close();
        else controller.enqueue(value);
      },
      cancel: (reason) => reader.cancel(reason),
    },
    { highWaterMark: 0 },
  );
  return new Response(body, response);
}

/** Reject after `timeoutMs`, and abort the request: a `fetch` of the caller's own may ignore its signal. */
function within<T>(promise: Promise<T>, timeoutMs: number, abort: AbortController): Promise<T> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => {
      const silence = new DOMException(`the server was silent for ${timeoutMs} ms`, "TimeoutError");
      reject(silence);
      abort.abort(silence);
    }, timeoutMs);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

async function waited(ms: number, signal: AbortSignal): Promise<void> {
  await new Promise<void>((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

async function jsonOf(response: Response): Promise<unknown> {
  const text = await response.text();
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Half to all of a wait, so that clients that were refused together come again apart. */
function jitter(): number {
  return 0.5 + Math.random() / 2;
}

/** Return a text for a failed `fetch`, whose own message hides the reason in `cause`. */
export function reasonOf(error: unknown): string {
  const cause = error instanceof Error && error.cause instanceof Error ? error.cause : error;
  return cause instanceof Error ? cause.message || cause.name : String(cause);
}
