// The tenant's contexts: a page of them, or those that match among the next two thousand.

import { html, useEffect, useState } from "./htm-preact.js";
import { call, contextPath } from "./api.js";
import { usePages } from "./pages.js";
import { Empty, Life, Problem, Tag, useEvery, useTitle } from "./pieces.js";
import { count, moment, plural, shortId, size, tierOf } from "./words.js";

const PAGE = 25;
const SCANNED = 100;
const SCANNED_MAX = 2000; // looked at for one page of matches: the API filters by model alone
const AT_ONCE = 4;
const REFRESH_MS = 15_000;

const listPath = (after, limit, model) =>
  `/v1/context?${new URLSearchParams({ limit, ...(after && { after }), ...(model && { model }) })}`;

async function matching(text, model, after, signal) {
  const wanted = text.toLowerCase();
  const says = (context) =>
    [context.session_id, context.model, context.state, context.holder?.endpoint, ...Object.entries(context.metadata).flat()]
      .some((value) => value?.toLowerCase().includes(wanted));
  const data = [];
  let [lastId, scanned, hasMore] = [after, 0, true];
  while (hasMore && scanned < SCANNED_MAX) {
    const found = await call("GET", listPath(lastId, SCANNED, model), { signal });
    for (const context of found.data) {
      scanned += 1;
      lastId = context.session_id;
      if (says(context)) data.push(context);
      if (data.length === PAGE) return { data, has_more: true, last_id: lastId, scanned };
    }
    [lastId, hasMore] = [found.last_id, found.has_more];
    if (!found.data.length) scanned += SCANNED; // a page of another model's: it was looked at all the same
  }
  return { data, has_more: hasMore, last_id: lastId, scanned };
}

export function Contexts({ models }) {
  const head = useTitle("Contexts");
  const [search, setSearch] = useState("");
  const [model, setModel] = useState("");
  const page = usePages(`${model} ${search}`, (after, signal) =>
    search ? matching(search, model, after, signal) : call("GET", listPath(after, PAGE, model), { signal }),
  );
  const kv = useKV(page.data);
  useEvery(REFRESH_MS, () => (search ? null : page.reload()));
  const submit = (event) => {
    event.preventDefault();
    setSearch(new FormData(event.currentTarget).get("text").trim());
  };
  return html`
    <div class="row head">
      <h1 ref=${head} tabindex="-1">Contexts</h1>
      <a class="button primary" href="#/playground">New context</a>
    </div>
    <form class="row filters" role="search" onSubmit=${submit}>
      <label class="grow"><span>Search</span>
        <input name="text" type="search" autocomplete="off" placeholder="id, metadata, holder or state" />
      </label>
      <label><span>Model</span>
        <select value=${model} onChange=${(event) => setModel(event.currentTarget.value)}>
          <option value="">All models</option>
          ${models.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      <button type="submit">Search</button>
    </form>
    <${Problem} error=${page.error}><button type="button" onClick=${page.reload}>Try again</button><//>
    ${page.data && !page.data.length && !page.hasMore && html`<${Nothing} isFiltered=${search || model} />`}
    ${page.data?.length > 0 && html`<${Table} contexts=${page.data} kv=${kv} />`}
    <${Pager} page=${page} said=${search && page.extra ? `searched ${plural(page.extra.scanned, "context")}` : ""} />
  `;
}

const Nothing = ({ isFiltered }) =>
  isFiltered
    ? html`<${Empty} title="No match">No live context has this text in its id, metadata, holder or state.<//>`
    : html`<${Empty} title="No contexts yet">
        Create one in the <a href="#/playground">playground</a>, or with <code>POST /v1/context</code>: its answer has the new id.
      <//>`;

// Bytes and tier, which only a read of each context tells: of those that are shown, a few at a time.
function useKV(contexts) {
  const [known, setKnown] = useState({});
  const named = (contexts ?? []).map((context) => `${context.session_id}@${context.generation}`).join(" ");
  useEffect(() => {
    const abort = new AbortController();
    const left = named ? named.split(" ") : [];
    setKnown((before) => Object.fromEntries(left.filter((name) => name in before).map((name) => [name, before[name]])));
    const work = async () => {
      for (let name; (name = left.shift()); ) {
        const id = name.slice(0, name.lastIndexOf("@"));
        try {
          const { bytes, tiers, holder } = await call("GET", contextPath(id), { signal: abort.signal });
          setKnown((before) => ({ ...before, [name]: { bytes, tiers, holder } }));
        } catch (error) {
          if (abort.signal.aborted || [0, 429, 503].includes(error.status)) return; // not the moment for more
        }
      }
    };
    for (let worker = 0; worker < AT_ONCE; worker += 1) work();
    return () => abort.abort();
  }, [named]);
  return known;
}

const COLUMNS = ["Context", "Model", "Turns", "Tokens", "KV", "Storage", "Holder", "Time left"];
const NUMBERS = new Set(["Turns", "Tokens", "KV"]);

function Table({ contexts, kv }) {
  return html`<div class="card"><table role="table" class="list">
    <caption class="hidden">Contexts, newest first</caption>
    <thead role="rowgroup"><tr role="row">
      ${COLUMNS.map((name) => html`<th role="columnheader" scope="col" class=${NUMBERS.has(name) ? "number" : ""}>${name}</th>`)}
    </tr></thead>
    <tbody role="rowgroup">
      ${contexts.map((context) => html`<${Row} key=${context.session_id} context=${context} kv=${kv[`${context.session_id}@${context.generation}`]} />`)}
    </tbody>
  </table></div>`;
}

function Row({ context, kv }) {
  const named = Object.entries(context.metadata).map(([name, value]) => `${name}: ${value}`).join(" · ");
  return html`<tr role="row">
    <td role="cell" class="name">
      <a href=${`#/contexts/${encodeURIComponent(context.session_id)}`} title=${context.session_id}><code>${shortId(context.session_id)}</code></a>
      ${context.state !== "ready" && html` <${Tag} kind=${context.state}>${context.state}<//>`}
      <small class="cut" title=${named}>${named || `created ${moment(context.created)}`}</small>
    </td>
    <td role="cell" data-name="Model" class="cut">${context.model}</td>
    <td role="cell" data-name="Turns" class="number">${count(context.turns)}</td>
    <td role="cell" data-name="Tokens" class="number">${count(context.tokens)}</td>
    <td role="cell" data-name="KV" class="number">${kv ? size(kv.bytes) : "…"}</td>
    <td role="cell" data-name="Storage">${kv ? kv.tiers.map(tierOf).join(", ") || kv.holder.state : "…"}</td>
    <td role="cell" data-name="Holder" class="cut">${context.holder?.endpoint || "–"}</td>
    <td role="cell" data-name="Time left"><${Life} expiresAt=${context.expires_at} ttl=${context.ttl} /></td>
  </tr>`;
}

export const Pager = ({ page, said }) => (page.number > 1 || page.next || said) && html`<nav class="row pager" aria-label="Pages" aria-busy=${page.isLoading}>
  <button type="button" disabled=${!page.first} onClick=${page.first}>First</button>
  <button type="button" disabled=${!page.previous} onClick=${page.previous}>Previous</button>
  <span role="status" class="number">Page ${count(page.number)}${said && ` · ${said}`}</span>
  <button type="button" disabled=${!page.next} onClick=${page.next}>Next</button>
</nav>`;
