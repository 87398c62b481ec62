// Deadlines, retries and errors over a `fetch` that answers as told. Timers are mocked: no test waits.
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { ApiError, BrokenStream, ConnectionFailed, ContextCache, NotCreated, NotUnderstood } from "context-cache";

type Answer = (request: Request) => Response | Promise<Response>;
const HANGING: Answer = (request) =>
  new Promise((_, reject) => request.signal.addEventListener("abort", () => reject(request.signal.reason)));
const usage = { prompt_tokens: 3, completion_tokens: 1, total_tokens: 4 };
const answer = { id: "1", object: "text_completion", model: "m", choices: [{ text: "x" }], usage, session_id: "ctx_1" };

function failing(status: number, code: string, headers: Record<string, string> = {}): Answer {
  const body = { type: "error", error: { message: "no", type: "t", code, param: null }, detail: "no" };
  return () => Response.json(body, { status, headers });
}

/** Answer with a stream of these pieces. */
function streaming(...texts: string[]): Answer {
  const start = (body: ReadableStreamDefaultController) => {
    for (const text of texts) body.enqueue(new TextEncoder().encode(text));
    body.close();
  };
  return () => new Response(new ReadableStream({ start }), { headers: { "x-session-id": "ctx_1" } });
}

/** Return a client whose server gives these answers in order, and the requests that it saw. */
function clientOf(...answers: Answer[]) {
  const requests: Request[] = [];
  const fetch = async (request: Request) => {
    requests.push(request);
    const next = answers[requests.length - 1];
    if (next === undefined) throw new Error("one request too many");
    return next(request);
  };
  return { requests, client: new ContextCache({ baseUrl: "http://server/v1/", apiKey: "key", timeoutMs: 1000, fetch }) };
}

/** Let the time of the timers pass until a promise settles; return its value or its error, and the milliseconds. */
async function settled<T>(promise: Promise<T>): Promise<{ value?: T; error?: unknown; ms: number }> {
  let done: { value?: T; error?: unknown } | undefined;
  promise.then((value) => (done = { value }), (error: unknown) => (done = { error }));
  for (let ms = 0; ms < 120_000; ms += 50) {
    for (let turn = 0; turn < 4 && done === undefined; turn += 1) await new Promise(setImmediate);
    if (done !== undefined) return { ...done, ms };
    mock.timers.tick(50);
  }
  throw new Error("not settled within two minutes");
}

test.beforeEach(() => mock.timers.enable({ apis: ["setTimeout", "Date"] }));
test.afterEach(() => mock.timers.reset());

test("a turn is repeated under one key after Retry-After, and not before it", async () => {
  const busy = failing(409, "context_busy", { "retry-after": "7" });
  const { client, requests } = clientOf(busy, failing(503, "store_unavailable", { "retry-after": "1" }), () => Response.json(answer));

  const { value, ms } = await settled(client.contexts.create({ model: "m", prompt: "x" }));

  assert.equal(value?.sessionId, "ctx_1");
  assert.ok(ms >= 8000 && ms < 9000, String(ms));
  assert.equal(new Set(requests.map((request) => request.headers.get("idempotency-key"))).size, 1);
  assert.deepEqual(await Promise.all(requests.map((request) => request.url)), Array(3).fill("http://server/v1/context"));
  assert.equal(requests[0]?.headers.get("authorization"), "Bearer key");
});

test("an error without Retry-After, and a wait beyond the minute, are told at once", async () => {
  for (const refused of [failing(409, "context_exists"), failing(429, "rate_limit_exceeded", { "retry-after": "61" })]) {
    const { client, requests } = clientOf(refused);
    const { error, ms } = await settled(client.contexts.create({ model: "m", prompt: "x" }));
    assert.ok(error instanceof ApiError);
    assert.deepEqual([requests.length, ms], [1, 0]);
  }
});

test("a fork whose effect is unknown is not repeated", async () => {
  for (const lost of [failing(503, "store_unavailable", { "retry-after": "1" }), () => Promise.reject(new TypeError("fetch failed"))]) {
    const read = () => Response.json({ object: "context", session_id: "ctx_1", model: "m" });
    const { client, requests } = clientOf(read, lost);
    const context = await client.contexts.get("ctx_1");
    const { error } = await settled(context.fork());
    assert.ok(error instanceof ApiError || error instanceof ConnectionFailed);
    assert.equal(requests.length, 2);
  }
});

test("a lost connection is tried five times, and its reason is told", async () => {
  const lost = () => Promise.reject(new TypeError("fetch failed", { cause: new Error("connect ECONNREFUSED") }));
  const { client, requests } = clientOf(lost, lost, lost, lost, lost);
  const { error } = await settled(client.contexts.get("ctx_1"));
  assert.ok(error instanceof ConnectionFailed);
  assert.equal(error.message, "no answer from http://server: connect ECONNREFUSED");
  assert.equal(requests.length, 5);
});

test("a silent server is left after the deadline, before its head and within a body", async () => {
  const silent = () => new Response(new ReadableStream({ start: (body) => body.enqueue(new TextEncoder().encode('data: {"choices":[{"text":"a"}]}\n\n')) }));
  const beforeHead = await settled(clientOf(HANGING).client.contexts.delete("ctx_1"));
  assert.ok(beforeHead.error instanceof ConnectionFailed);
  assert.match(beforeHead.error.message, /silent for 1000 ms/);
  assert.equal(beforeHead.ms, 1000);

  const inBody = await settled(clientOf(silent).client.contexts.createStream({ model: "m", prompt: "x" }).whole());
  assert.ok(inBody.error instanceof BrokenStream);
  assert.deepEqual([inBody.error.text, inBody.ms], ["a", 1000]);
});

test("the caller's own signal ends a call, also between two attempts", async () => {
  for (const first of [HANGING, failing(409, "context_busy", { "retry-after": "30" })]) {
    const own = new AbortController();
    setTimeout(() => own.abort(new Error("enough")), 500);
    const { client, requests } = clientOf(first);
    const { error, ms } = await settled(client.contexts.create({ model: "m", prompt: "x", signal: own.signal }));
    assert.deepEqual([(error as Error).message, ms, requests.length], ["enough", 500, 1]);
  }
});

test("a stream joins text and tool calls, and ends with the answer", async () => {
  const chunk = (delta: object) => `data: ${JSON.stringify({ session_id: "ctx_1", choices: [{ delta }] })}\n\n`;
  const call = (piece: string) => chunk({ tool_calls: [{ index: 0, ...(piece === "{" && { id: "c1" }), function: { arguments: piece } }] });
  const { client } = clientOf(streaming(": keep-alive\n\n", chunk({ content: "Loi" }), chunk({ content: "re" }), call("{"), call("}"), "data: [DONE]\n\n"));

  const stream = client.contexts.createStream({ model: "m", prompt: "x" });
  const reply = await stream.whole();

  assert.deepEqual([reply.text, reply.toolCalls], ["Loire", [{ function: { name: "", arguments: "{}" }, id: "c1" }]]);
  assert.equal(stream.context?.reply, reply);
});

test("a stream that ends early, is no answer, or tells an error says so with its text", async () => {
  const text = 'data: {"choices":[{"text":"half"}]}\n\n';
  const tooLong = [`data: {"x":"${"x".repeat(9 << 20)}`, '"}\n\n'];
  for (const [message, ...end] of [[/ended before/], [/broke/, "data: {\n\n"], [/exceed/, ...tooLong]] as [RegExp, ...string[]][]) {
    const { error } = await settled(clientOf(streaming(text, ...end)).client.contexts.createStream({ model: "m", prompt: "x" }).whole());
    assert.ok(error instanceof BrokenStream, String(error));
    assert.match(error.message, message);
    assert.equal(error.text, "half");
  }
  const refused = streaming(text, 'data: {"error":{"message":"lost","code":"engine_error"}}\n\ndata: [DONE]\n\n');
  const { error } = await settled(clientOf(refused).client.contexts.createStream({ model: "m", prompt: "x" }).whole());
  assert.ok(error instanceof ApiError);
  assert.deepEqual([error.code, error.status, error.message], ["engine_error", 500, "lost"]);
});

test("a loop that leaves a stream closes it", async () => {
  let isClosed = false;
  const chunk = new TextEncoder().encode('data: {"choices":[{"text":"a"}]}\n\n');
  const endless = () => new Response(new ReadableStream({ pull: (body) => body.enqueue(chunk), cancel: () => void (isClosed = true) }));
  const stream = clientOf(endless).client.contexts.createStream({ model: "m", prompt: "x" });
  for await (const _ of stream) break;
  assert.ok(isClosed);
  await assert.rejects(stream.whole(), BrokenStream);
});

test("a create that stored nothing is not created", async () => {
  const nothing = { ...answer, session_id: null };
  for (const call of [
    (client: ContextCache) => client.contexts.create({ model: "m", prompt: "x" }),
    (client: ContextCache) => client.contexts.createStream({ model: "m", prompt: "x" }).whole(),
  ]) {
    const stored = (request: Request) => request.clone().text().then((body) =>
      body.includes('"stream":true') ? streaming(`data: ${JSON.stringify(nothing)}\n\n`, "data: [DONE]\n\n")(request) : Response.json(nothing));
    const { error } = await settled<unknown>(call(clientOf(stored).client));
    assert.ok(error instanceof NotCreated);
    assert.equal(error.reply.sessionId, null);
  }
});

test("a page of another program is not understood, and a proxy's error keeps its status", async () => {
  for (const page of ["<html>", '"text"']) {
    const { error } = await settled(clientOf(() => new Response(page)).client.contexts.get("ctx_1"));
    assert.ok(error instanceof NotUnderstood);
  }
  const { error } = await settled(clientOf(() => new Response("<html>", { status: 502 })).client.contexts.get("ctx_1"));
  assert.ok(error instanceof ApiError);
  assert.deepEqual([error.status, error.code, error.message], [502, "", "the server answered with HTTP status 502"]);
});

test("a list that repeats itself ends", async () => {
  const page = () => Response.json({ object: "list", data: [{ session_id: "ctx_1" }], has_more: true, last_id: "ctx_1" });
  const { client, requests } = clientOf(page, page);
  const { error } = await settled(Array.fromAsync(client.contexts.list()));
  assert.ok(error instanceof NotUnderstood);
  assert.match(requests[1]?.url ?? "", /\?limit=100&after=ctx_1$/);
});

test("a missing URL or key, and a password in the URL, are refused", () => {
  const apiKey = "key";
  for (const options of [{ apiKey }, { baseUrl: "server", apiKey }, { baseUrl: "http://server" }, { baseUrl: "http://a:b@server", apiKey }]) {
    assert.throws(() => new ContextCache(options), TypeError);
  }
});
