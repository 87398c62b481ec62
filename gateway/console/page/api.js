// The only place that calls the server. The API key lives in this module's memory, and nowhere else.

const CALL_TIMEOUT_MS = 15_000;
const SILENCE_MS = 300_000; // of a stream: a long prompt says nothing until its first token

let key = "";

export function setKey(given) {
  key = given.trim();
}

export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status; // 0: no answer came
    this.code = code;
  }
}

const SENTENCES = {
  __proto__: null, // a code is any word
  invalid_api_key: "This API key is unknown.",
  context_not_found: "This context does not exist: it was deleted, or it belongs to another tenant.",
  context_expired: "This context has expired, and its conversation is deleted.",
  context_busy: "Another turn of this context is running.",
  generation_mismatch: "Another client has continued this context. This request did nothing, so that no turn is lost.",
  store_unavailable: "The server cannot reach the context manager or its Redis. Contexts are available again when it can.",
  no_ready_endpoint: "No pod is ready to answer.",
  gateway_unavailable: "No gateway is available.",
};
const UNREACHABLE = "The gateway does not answer. Check that it runs, and that this browser can reach it.";

async function refusalOf(answer) {
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch {
    // Somebody before the gateway answered, in words that are not for us.
  }
  const wait = Number(answer.headers.get("retry-after"));
  const sentence = SENTENCES[told.code] ?? asSentence(told.message ?? `The server answered with status ${answer.status}.`);
  return new Refusal(answer.status, told.code ?? "", wait ? `${sentence} Try again in ${wait} s.` : sentence);
}

function asSentence(said) {
  const text = typeof said === "string" ? said : JSON.stringify(said);
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

async function send(method, path, { body, headers, signal }) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "", error.name === "TimeoutError" ? "The server did not answer within its deadline." : UNREACHABLE);
  }
  if (!answer.ok) throw await refusalOf(answer);
  return answer;
}

// Return what a call answers. Raises Refusal.
export async function call(method, path, { body, signal } = {}) {
  const deadline = AbortSignal.timeout(CALL_TIMEOUT_MS);
  const answer = await send(method, path, { body, signal: signal ? AbortSignal.any([signal, deadline]) : deadline });
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "", "The server’s answer was cut off.");
  }
}

export const contextPath = (id, change = "") => `/v1/context/${encodeURIComponent(id)}${change}`;

// Send a request whose answer is a stream, and hand over each event. Returns the answer's headers when it ended well.
export async function stream(path, body, { headers, signal, onEvent }) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    const answer = await send("POST", path, { body, headers, signal: AbortSignal.any([signal, silence.signal]) });
    let isDone = false;
    let rest = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (data === "[DONE]") isDone = true;
        else if (data) onEvent(eventOf(data));
      }
    }
    if (!isDone) throw new Refusal(0, "", "The answer was cut off. The turn was not committed, unless only its end was lost.");
    return answer.headers;
  } catch (error) {
    if (error instanceof Refusal) throw error;
    if (signal.aborted) throw new Refusal(0, "stopped", "Stopped. Nothing was committed.");
    throw new Refusal(0, "", silence.signal.aborted ? "The server sent no data for five minutes." : UNREACHABLE);
  } finally {
    clearTimeout(timer);
  }
}

function eventOf(data) {
  const event = JSON.parse(data);
  if (event.error) throw new Refusal(0, event.error.code ?? "", asSentence(event.error.message ?? "The engine failed."));
  return event;
}
