// Turns run from this tab, and what it remembers of them: bounded, and gone with the tab. The server remembers the last
// turns of a context, whoever ran them.

import { contextPath, call, stream } from "./api.js";

const CONTEXTS_MAX = 200;
const TURNS_MAX = 64;
const COLD_SAMPLES = 1;
const PLAIN_IDS = [300, 900]; // token ids that every vocabulary has, and that are no special ones

let conversations = new Map();

export const forget = () => (conversations = new Map());

// What this tab knows of a context: its turns, and where it saw them all its messages, of a generation (else null).
export function conversationOf(id) {
  return conversations.get(id) ?? { turns: [], messages: null };
}

function keep(id, change) {
  const changed = { ...conversationOf(id), ...change };
  changed.turns = changed.turns.slice(-TURNS_MAX);
  conversations.delete(id);
  conversations.set(id, changed);
  if (conversations.size > CONTEXTS_MAX) conversations.delete(conversations.keys().next().value);
}

// Read a context; messages of another generation than it is at now are not the whole conversation any more.
export async function read(id, signal) {
  const context = await call("GET", contextPath(id), { signal });
  const known = conversationOf(id);
  if (known.messages && known.generation !== context.generation) keep(id, { messages: null });
  return context;
}

// Run one turn to its end; returns { id, turn }. `kind`: create, ask or replay. Raises Refusal.
export async function runTurn({ kind, id, model, messages, ttl, maxTokens, metadata, timesCold, signal, onText, onCold }) {
  const before = id ? conversationOf(id) : null;
  const asked = { model, messages, max_tokens: maxTokens, stream: true, stream_options: { include_usage: true } };
  const path = kind === "create" ? "/v1/context" : "/v1/chat/completions";
  if (kind === "create") Object.assign(asked, { ttl, metadata });
  else Object.assign(asked, { session_id: id, context_mode: kind === "replay" ? "replay" : "append" });
  // A replay takes the place of all that is there: what others said since must not go with it.
  const headers = kind === "replay" ? { "if-match": String(before.generation) } : {};
  const answered = await timed(path, asked, headers, signal, onText);
  const usage = answered.last.usage ?? {};
  const told = usage.context ?? {};
  const named = answered.last.session_id ?? answered.headers.get("x-session-id") ?? id;
  const turn = {
    kind,
    at: Date.now(),
    generation: Number(answered.headers.get("x-context-generation")) || null,
    computed: told.computed_tokens ?? 0,
    cached: told.cached_tokens ?? 0,
    savedShare: told.saved_share,
    contextTokens: told.context_tokens ?? 0,
    answered: usage.completion_tokens ?? 0,
    source: told.source,
    restoreMs: told.restore_ms,
    reason: told.reason,
    diverged: told.diverged,
    committed: told.committed,
    ttftMs: answered.ttftMs,
    totalMs: answered.totalMs,
    coldMs: null,
  };
  const answer = { role: "assistant", content: answered.text };
  const sawAll = kind !== "ask" || (before.messages && turn.generation === before.generation + 1);
  const heard = { messages: sawAll ? [...(kind === "ask" ? before.messages : []), ...messages, answer] : null, generation: turn.generation };
  keep(named, { turns: [...(before?.turns ?? []), turn], ...(told.committed === false && before ? {} : heard) });
  if (timesCold) onCold();
  if (timesCold) await timeCold(named, turn, model, signal);
  return { id: named, turn, text: answered.text };
}

// Time a prompt of as many tokens that shares nothing with anything: what the turn would have cost without the context.
async function timeCold(id, turn, model, signal) {
  const [low, high] = PLAIN_IDS;
  const prompt = Array.from({ length: turn.cached + turn.computed }, () => low + Math.floor(Math.random() * (high - low)));
  const body = { model, prompt, max_tokens: COLD_SAMPLES, stream: true };
  try {
    turn.coldMs = (await timed("/v1/completions", body, { "x-context-keep": "off" }, signal, () => {})).ttftMs;
  } catch (refusal) {
    turn.coldError = refusal.message;
  }
  keep(id, {});
}

async function timed(path, body, headers, signal, onText) {
  const began = performance.now();
  let [ttftMs, text, last] = [null, "", {}];
  const answerHeaders = await stream(path, body, {
    headers,
    signal,
    onEvent(event) {
      const choice = event.choices?.[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (ttftMs === null && (piece || choice?.finish_reason)) ttftMs = performance.now() - began;
      if (event.usage || event.session_id) last = event;
      if (piece) onText((text += piece));
    },
  });
  return { headers: answerHeaders, ttftMs, totalMs: performance.now() - began, text, last };
}

// Return the turns of a context that was read, the oldest first: as this tab saw them where it did, else as the server did.
export function turnsOf(context) {
  const ours = conversationOf(context.session_id).turns;
  const seen = new Set(ours.filter((turn) => turn.committed !== false).map((turn) => turn.generation));
  const theirs = (context.recent_turns ?? []).filter((turn) => !seen.has(turn.generation)).map((turn) => ({
    kind: turn.match ?? "create",
    at: turn.at * 1000,
    generation: turn.generation,
    computed: turn.computed_tokens,
    cached: turn.cached_tokens,
    savedShare: turn.saved_share,
    contextTokens: turn.context_tokens,
    answered: turn.completion_tokens,
    source: turn.source,
    restoreMs: turn.restore_ms,
    reason: turn.reason,
    committed: true,
    ttftMs: turn.first_token_ms,
    totalMs: turn.took_ms,
    coldMs: null,
  }));
  return [...theirs, ...ours].sort((one, other) => one.at - other.at);
}

// Fork a context at its newest turn.
export async function fork(context) {
  const made = await call("POST", contextPath(context.session_id, "/fork"), { body: {} });
  const source = conversationOf(context.session_id);
  const isAsSeen = made.forked_from?.generation === source.generation;
  keep(made.session_id, { turns: [], messages: isAsSeen ? source.messages : null, generation: made.generation });
  keep(context.session_id, { forks: [...(source.forks ?? []), made.session_id].slice(-TURNS_MAX) });
  return made;
}

export async function rewind(id, generation) {
  const context = await call("POST", contextPath(id, "/rewind"), { body: { generation } });
  keep(id, { messages: null }); // which messages are left is the server's to know
  return context;
}

export async function remove(id) {
  await call("DELETE", contextPath(id));
  conversations.delete(id);
}
