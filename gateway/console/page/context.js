// One context: what it is, where its KV is, what its last turns took, what it was forked from and what from it.

import { html, useEffect, useState } from "./htm-preact.js";
import { call, contextPath } from "./api.js";
import { Confirm, Copy, Fact, Life, Loading, Problem, Saved, SavedNote, Tag, useEvery, useTitle } from "./pieces.js";
import { conversationOf, fork, read, remove, rewind, turnsOf } from "./turns.js";
import { TurnList } from "./turnlist.js";
import { count, moment, plural, reasonOf, shortId, size, span, tierOf, titleOf } from "./words.js";

const REFRESH_MS = 5_000;
const ANCESTORS_MAX = 16;
const FORKS_AMONG = 100; // of the newest contexts: one page
const HOLDERS = {
  sealed: "the newest KV is saved",
  pending: "the newest KV is still being saved",
  absent: "no KV is stored: the next turn computes the whole prompt",
  unreachable: "its sidecar does not answer",
};

export function Context({ id }) {
  const [context, setContext] = useState(null);
  const [error, setError] = useState(null);
  const [question, setQuestion] = useState(null);
  const title = context ? titleOf(context) : "";
  const head = useTitle(`Context ${title || shortId(id)}`);
  const look = () => read(id).then((found) => (setContext(found), setError(null)), setError);
  useEffect(() => void look(), [id]);
  useEvery(REFRESH_MS, () => (question || error?.status === 404 || error?.status === 410 ? null : look()));
  const act = (doing) => async () => {
    setQuestion(null);
    try {
      const found = await doing();
      if (found?.session_id === id) setContext(found);
      setError(null);
    } catch (refusal) {
      setError(refusal);
    }
  };
  const forked = act(async () => (location.hash = `#/contexts/${encodeURIComponent((await fork(context)).session_id)}`));
  const removed = act(async () => {
    await remove(id);
    location.hash = "#/contexts";
  });
  const longer = act(() => call("PATCH", contextPath(id), { body: { ttl: context.ttl } }));
  const back = (event) => {
    event.preventDefault();
    const generation = Number(new FormData(event.currentTarget).get("generation"));
    setQuestion({ question: `Rewind to turn ${generation}?`, verb: "Rewind", detail: "This drops the later turns. It cannot be undone.", onYes: act(() => rewind(id, generation)) });
  };
  const leave = () => setQuestion({ question: "Delete this context?", verb: "Delete", onYes: removed,
    detail: "This deletes its conversation, and its KV on every sidecar that answers. It cannot be undone." });
  const isGone = error && [404, 410].includes(error.status);
  return html`
    <p class="crumb"><a href="#/contexts">Contexts</a></p>
    <div class="row head">
      <h1 ref=${head} tabindex="-1" class=${title ? "break" : "id"}>${title || html`<code>${id}</code>`}</h1>
      ${context && !isGone && html`<${Tag} kind=${context.state}>${context.state}<//>`}
      <${Copy} text=${id} what="id" />
    </div>
    ${title && html`<p class="id"><code>${id}</code></p>`}
    <${Problem} error=${error} />
    ${!context && !error && html`<${Loading} name="the context" />`}
    ${context && !isGone && html`
      <div class="row actions">
        <a class="button primary" href=${`#/playground/${encodeURIComponent(id)}`}>Continue in the playground</a>
        <button type="button" onClick=${forked}>Fork</button>
        <form class="row tight" onSubmit=${back}>
          <label class="inline">Rewind to turn
            <input name="generation" type="number" min="1" max=${context.generation} required value=${Math.max(1, context.generation - 1)} />
          </label>
          <button type="submit">Rewind</button>
        </form>
        <button type="button" onClick=${longer}>Extend to ${span(context.ttl)}</button>
        <button type="button" class="danger" onClick=${leave}>Delete</button>
      </div>
      <${Facts} context=${context} />
      <${SavedNote} />
      <h2>Turns</h2>
      <${Turns} context=${context} />
      <h2>Lineage</h2>
      <${Lineage} context=${context} />
      <${Metadata} metadata=${context.metadata} />`}
    ${question && html`<${Confirm} ...${question} onNo=${() => setQuestion(null)} />`}
  `;
}

const Facts = ({ context }) => html`<dl class="facts card">
  <${Fact} name="Model">${context.model}<//>
  <${Fact} name="Turns"><span class="number">${count(context.turns)}</span><//>
  <${Fact} name="Tokens"><span class="number">${count(context.tokens)}</span><//>
  <${Fact} name="Saved"><${Saved} of=${context} /><//>
  <${Fact} name="KV size"><span class="number">${size(context.bytes)}</span><//>
  <${Fact} name="Storage">${context.tiers.map(tierOf).join(", ") || "–"}<//>
  <${Fact} name="Holder">${context.holder.endpoint || "–"}<small>${HOLDERS[context.holder.state]}${
    context.holder.reason ? `: ${reasonOf(context.holder.reason)}` : ""}</small><//>
  <${Fact} name="Generation"><span class="number">${count(context.generation)}</span><//>
  <${Fact} name="Mode">${context.mode}<//>
  ${context.parent && html`<${Fact} name="Parent"><${Named} id=${context.parent} /><//>`}
  <${Fact} name="Created"><span class="number">${moment(context.created)}</span><//>
  <${Fact} name="Time left"><${Life} expiresAt=${context.expires_at} ttl=${context.ttl} />
    <small class="number">${moment(context.expires_at)}, ${context.ttl_policy === "sliding" ? "sliding: each turn extends it" : "fixed"}</small><//>
</dl>`;

function Turns({ context }) {
  const turns = turnsOf(context);
  // A fork's first commit is no turn.
  const missing = context.turns - turns.filter((turn) => turn.committed !== false).length - (context.forked_from ? 1 : 0);
  return html`
    ${turns.length > 0 && html`<${TurnList} turns=${turns} />`}
    ${context.forked_from && html`<p class="note">Turn 1 is the fork: it begins with ${shortId(context.forked_from.session_id)} at turn ${context.forked_from.generation}.</p>`}
    ${missing > 0 && html`<p class="note">${plural(missing, "earlier turn")} not shown: the server stores only the last turns.</p>`}`;
}

function Lineage({ context }) {
  const [ancestors, setAncestors] = useState([]);
  const [forks, setForks] = useState([]);
  const id = context.session_id;
  useEffect(() => {
    const abort = new AbortController();
    setAncestors([]);
    setForks(conversationOf(id).forks ?? []);
    climb(context.forked_from, abort.signal, setAncestors);
    call("GET", `/v1/context?limit=${FORKS_AMONG}`, { signal: abort.signal }).then(({ data }) => {
      const found = data.filter((other) => other.forked_from?.session_id === id).map((other) => other.session_id);
      setForks((known) => [...new Set([...known, ...found])]);
    }, () => null);
    return () => abort.abort();
  }, [id]);
  if (!context.forked_from && !forks.length) return html`<p class="note">This context is not a fork. None of the newest ${FORKS_AMONG} contexts is a fork of it.</p>`;
  return html`<ul class="tree card">
    ${ancestors.map((found, depth) => html`<li style=${{ paddingInlineStart: `${depth * 1.25}rem` }}>
      ${found.isGone ? html`<code>${shortId(found.id)}</code> <small>deleted</small>` : html`<${Named} id=${found.id} />`}
      <small class="number"> forked at turn ${found.generation}</small></li>`)}
    <li aria-current="true" style=${{ paddingInlineStart: `${ancestors.length * 1.25}rem` }}><code>${shortId(id)}</code> <small>this context</small></li>
    ${forks.map((name) => html`<li style=${{ paddingInlineStart: `${(ancestors.length + 1) * 1.25}rem` }}><${Named} id=${name} /></li>`)}
  </ul>`;
}

const Named = ({ id }) => html`<a href=${`#/contexts/${encodeURIComponent(id)}`}><code>${shortId(id)}</code></a>`;

async function climb(forkedFrom, signal, onFound) {
  const found = [];
  while (forkedFrom && found.length < ANCESTORS_MAX) {
    const parent = await call("GET", contextPath(forkedFrom.session_id), { signal }).catch(() => null);
    if (signal.aborted) return;
    found.unshift({ id: forkedFrom.session_id, generation: forkedFrom.generation, isGone: !parent });
    onFound([...found]);
    forkedFrom = parent?.forked_from;
  }
}

const Metadata = ({ metadata }) => {
  const entries = Object.entries(metadata);
  return entries.length > 0 && html`<h2>Metadata</h2>
    <dl class="facts card">${entries.map(([name, value]) => html`<${Fact} name=${name}><span class="break">${value}</span><//>`)}</dl>`;
};
