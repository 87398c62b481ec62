// Create a context, ask, ask again: each turn streamed, and timed beside what it would have cost without the context.

import { html, useEffect, useRef, useState } from "./htm-preact.js";
import { Chart } from "./chart.js";
import { Confirm, Elapsed, Empty, Problem, Saved, SavedNote, useTitle } from "./pieces.js";
import { TurnList } from "./turnlist.js";
import { conversationOf, fork, read, remove, runTurn, turnsOf } from "./turns.js";
import { milliseconds, shortId, tick, titleOf } from "./words.js";

const SYSTEM = "You are a careful assistant. Answer briefly.";

export function Playground({ id: given, models }) {
  const head = useTitle("Playground");
  const [context, setContext] = useState(null);
  const [error, setError] = useState(null);
  const [streamed, setStreamed] = useState(null);
  const [wantsDelete, setWantsDelete] = useState(false);
  const running = useRef(null);
  const form = useRef(null);
  const id = context?.session_id ?? null;
  useEffect(() => {
    setError(null);
    if (given === id) return undefined;
    // What is asked now must not go to the context that was shown before; nor does a late answer bring one back.
    setContext(null);
    const late = new AbortController();
    if (given) read(given, late.signal).then(setContext, (refusal) => late.signal.aborted || setError(refusal));
    return () => late.abort();
  }, [given]);
  useEffect(() => () => running.current?.abort(), []);

  const show = (found) => {
    setContext(found);
    history.replaceState(null, "", `#/playground/${encodeURIComponent(found.session_id)}`);
  };
  async function run(kind, messages) {
    const said = new FormData(form.current);
    running.current = new AbortController();
    setError(null);
    setStreamed({ kind, question: messages.at(-1).content, text: "" });
    try {
      const ran = await runTurn({
        kind, id, messages,
        model: context?.model ?? said.get("model"),
        ttl: Number(said.get("ttl")),
        maxTokens: Number(said.get("max_tokens")),
        metadata: kind === "create" ? { made_in: "console", ...(said.get("title").trim() && { title: said.get("title").trim() }) } : undefined,
        timesCold: said.get("cold") === "on",
        signal: running.current.signal,
        onText: (text) => setStreamed((before) => ({ ...before, text })),
        onCold: () => setStreamed((before) => ({ ...before, isCold: true })),
      });
      form.current.elements.message.value = "";
      show(await read(ran.id));
    } catch (refusal) {
      setError(refusal);
      if (refusal.code === "generation_mismatch") read(id).then((found) => setContext((shown) => (shown?.session_id === id ? found : shown)), () => null);
    } finally {
      running.current = null;
      setStreamed(null);
      // When the form is drawn as it is from now on: what moves in it loses the focus.
      setTimeout(() => form.current?.elements.message.focus());
    }
  }
  const ask = (event) => {
    event.preventDefault();
    const said = new FormData(event.currentTarget);
    const user = { role: "user", content: said.get("message") };
    const system = said.get("system")?.trim();
    if (id) run("ask", [user]);
    else run("create", system ? [{ role: "system", content: system }, user] : [user]);
  };
  const [turns, messages] = id ? [turnsOf(context), conversationOf(id).messages] : [[], null];
  const act = (doing) => () => doing().catch(setError);
  const forked = act(async () => show(await fork(context)));
  const removed = act(async () => {
    setWantsDelete(false);
    await remove(id);
    startAnew();
  });
  const startAnew = () => {
    setContext(null);
    history.replaceState(null, "", "#/playground");
  };
  return html`
    <div class="row head">
      <h1 ref=${head} tabindex="-1">Playground</h1>
      ${id && html`<a href=${`#/contexts/${encodeURIComponent(id)}`} title=${id}>${titleOf(context) || html`<code>${shortId(id)}</code>`}</a>`}
    </div>
    <div class="split">
      <section aria-label="Conversation">
        <${Messages} messages=${messages} isOpen=${Boolean(id)} streamed=${streamed} />
        <${Problem} error=${error} />
        <form class="card ask" ref=${form} onSubmit=${ask}>
          ${!id && html`<${NewContext} models=${models} />`}
          <label><span>Message</span>
            <textarea name="message" rows="3" required onKeyDown=${(event) =>
              event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.currentTarget.form.requestSubmit()}></textarea>
          </label>
          <div class="row">
            <button type="submit" class="primary" disabled=${streamed}>${id ? "Ask" : "Create and ask"}</button>
            ${streamed && html`<button type="button" onClick=${() => running.current?.abort()}>Stop</button>
              <${Elapsed} key=${phaseOf(streamed)}>${phaseOf(streamed)}<//>`}
            ${id && html`
              <button type="button" disabled=${streamed || !messages} title=${messages ? "" : "Replay needs the whole conversation, and this tab has only a part of it"}
                onClick=${() => run("replay", messages.slice(0, -1))}>Replay</button>
              <button type="button" disabled=${streamed} onClick=${forked}>Fork</button>
              <button type="button" disabled=${streamed} onClick=${startAnew}>New</button>
              <button type="button" class="danger" disabled=${streamed} onClick=${() => setWantsDelete(true)}>Delete</button>`}
          </div>
          <div class="row small">
            <label class="inline">Answer limit <input name="max_tokens" type="number" min="1" max="4096" value="64" /> tokens</label>
            <label class="inline"><input name="cold" type="checkbox" defaultChecked /> Also time a cold prompt of the same length</label>
          </div>
        </form>
      </section>
      <section aria-label="Measured">
        ${turns.length
          ? html`<div class="card"><h2>Time to the first token</h2><${FirstTokens} turns=${turns} /></div>
            <div class="card saved-sum"><h2>Saved by this context</h2><p><${Saved} of=${context} /></p><${SavedNote} /></div>`
          : html`<${Empty} title="No turns yet">The chart compares each turn with a cold prompt of the same length, which reuses no KV.<//>`}
      </section>
    </div>
    ${turns.length > 0 && html`<h2>Turns</h2><${TurnList} turns=${turns} />`}
    ${wantsDelete && html`<${Confirm} question="Delete this context?" detail="This deletes its conversation and its KV. It cannot be undone." verb="Delete"
      onYes=${removed} onNo=${() => setWantsDelete(false)} />`}
  `;
}

const phaseOf = ({ text, isCold }) => (isCold ? "Timing a cold prompt" : text ? "Answering" : "Waiting for the first token");

function FirstTokens({ turns }) {
  const last = turns.at(-1);
  const told = `Time to the first token of ${turns.length} turns; the last took ${milliseconds(last.ttftMs)}, cold ${milliseconds(last.coldMs)}.`;
  const cold = turns.map((turn) => turn.coldMs ?? (turn.kind === "create" ? turn.ttftMs : null));
  return html`<${Chart} told=${told} x=${turns.map((_, at) => at + 1)} format=${milliseconds} tick=${tick} lines=${[
    { label: "With the context", colour: "cached", values: turns.map((turn) => turn.ttftMs) },
    { label: "Cold", colour: "computed", dash: [5, 4], values: cold },
  ]} />`;
}

// Some 1 500 tokens: what a context saves shows from about a thousand on.
const SAMPLE = Array.from({ length: 60 }, (_, at) => `In the year ${1900 + at} the river stood ${at % 7} metres high at the old bridge.`).join(" ");
const fillSample = (event) => (event.currentTarget.form.elements.system.value = SAMPLE);

const NewContext = ({ models }) => html`
  <div class="row">
    <label class="grow"><span>Model</span>
      <select name="model" required>${models.map((name) => html`<option value=${name}>${name}</option>`)}</select>
    </label>
    <label><span>Expires after</span>
      <select name="ttl"><option value="600">10 minutes</option><option value="3600" selected>1 hour</option><option value="86400">1 day</option></select>
    </label>
  </div>
  <label><span>Title (optional)</span><input name="title" autocomplete="off" maxlength="80" /></label>
  <label><span>System prompt</span><textarea name="system" rows="2" defaultValue=${SYSTEM}></textarea></label>
  <div class="row small"><button type="button" onClick=${fillSample}>Use a long document</button>
    <span class="note">A short prompt computes as fast as it loads. A context saves time from about 1,000 tokens.</span></div>`;

function Messages({ messages, isOpen, streamed }) {
  const end = useRef(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [streamed?.text, messages?.length]);
  const isReplay = streamed?.kind === "replay";
  return html`<div class="messages" tabindex="0" role="log" aria-label="Messages" aria-busy=${Boolean(streamed)}>
    ${isOpen && !messages && html`<p class="note">The server does not return earlier messages. New turns still continue the conversation.</p>`}
    ${(isReplay ? messages.slice(0, -1) : messages ?? []).map((message) => html`<${Message} ...${message} />`)}
    ${streamed && !isReplay && html`<${Message} role="user" content=${streamed.question} />`}
    ${streamed && html`<${Message} role="assistant" content=${streamed.text || "…"} />`}
    <span ref=${end}></span>
  </div>`;
}

// A text node: whatever a model writes stays text.
const Message = ({ role, content }) => html`<div class=${`message ${role}`}><span class="role">${role}</span><div class="said">${content}</div></div>`;
