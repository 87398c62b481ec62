// The tenant's contexts: a page of them, those that match among the next two thousand, or the newest two thousand sorted.

import { html, useEffect, useRef, useState } from "./htm-preact.js";
import { call, contextPath } from "./api.js";
import { each, usePages } from "./pages.js";
import { Confirm, Elapsed, Empty, Life, Loading, Problem, Saved, SavedNote, Tag, useEvery, useTitle } from "./pieces.js";
import { remove } from "./turns.js";
import { count, moment, plural, shortId, size, tierOf, titleOf } from "./words.js";

const PAGE = 25;
const SCANNED = 100;
const SCANNED_MAX = 2000; // looked at for one page of matches: the API filters by model alone, and sorts by age alone
const REFRESH_MS = 15_000;

const listPath = (after, limit, model) =>
  `/v1/context?${new URLSearchParams({ limit, ...(after && { after }), ...(model && { model }) })}`;

// Columns by name: how to sort by them, and which way first. Bytes are not in a list, so no order is by them.
const SORTS = {
  Newest: null,
  Context: [(context) => titleOf(context).toLowerCase() || context.session_id, 1],
  Model: [(context) => context.model, 1],
  State: [(context) => context.state, 1],
  Turns: [(context) => context.turns, -1],
  Tokens: [(context) => context.tokens, -1],
  Saved: [(context) => context.saved_share ?? -1, -1],
  "Time left": [(context) => context.expires_at, 1],
};

const orderOf = ({ by, way }) => {
  const [value] = SORTS[by];
  return (one, other) => way * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0);
};

// Look at contexts from `after` on, newest first, until `limit` of them match.
async function scan({ text, model, after, limit, signal }) {
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
      if (data.length === limit) return { data, has_more: true, last_id: lastId, scanned };
    }
    [lastId, hasMore] = [found.last_id, found.has_more];
    if (!found.data.length) scanned += SCANNED; // a page of another model's: it was looked at all the same
  }
  return { data, has_more: hasMore, last_id: lastId, scanned };
}

export function Contexts({ models }) {
  const head = useTitle("Contexts");
  const [text, setText] = useState("");
  const [model, setModel] = useState("");
  const [sort, setSort] = useState({ by: "Newest", way: 1 });
  const [chosen, setChosen] = useState(new Map());
  const all = useRef(null);
  const sorted = async (after, signal) => {
    if (!after) all.current = await scan({ text, model, after, limit: SCANNED_MAX, signal });
    const { data, has_more: isCut, scanned } = all.current;
    const from = Number(after);
    const shown = [...data].sort(orderOf(sort)).slice(from, from + PAGE);
    return { data: shown, has_more: from + PAGE < data.length, last_id: String(from + PAGE), said: `sorted ${isCut ? `the newest ${count(scanned)} contexts` : plural(scanned, "context")}` };
  };
  const searched = async (after, signal) => {
    const found = await scan({ text, model, after, limit: PAGE, signal });
    return { ...found, said: `searched ${plural(found.scanned, "context")}` };
  };
  const isPlain = sort.by === "Newest" && !text;
  const page = usePages(`${model} ${sort.by} ${sort.way} ${text}`, (after, signal) => {
    if (sort.by !== "Newest") return sorted(after, signal);
    return text ? searched(after, signal) : call("GET", listPath(after, PAGE, model), { signal });
  });
  const kv = useKV(page.data);
  useEvery(REFRESH_MS, () => (isPlain ? page.reload() : null));
  const sortBy = (by) => setSort((last) => ({ by, way: last.by === by ? -last.way : SORTS[by]?.[1] ?? 1 }));
  const submit = (event) => {
    event.preventDefault();
    setText(new FormData(event.currentTarget).get("text").trim());
  };
  const choose = (contexts, isChosen) => setChosen((before) => {
    const after = new Map(before);
    for (const context of contexts) if (isChosen) after.set(context.session_id, context); else after.delete(context.session_id);
    return after;
  });
  return html`
    <div class="row head">
      <h1 ref=${head} tabindex="-1">Contexts</h1>
      <a class="button primary" href="#/playground">New context</a>
    </div>
    <${SavedNote} />
    <form class="row filters" role="search" onSubmit=${submit}>
      <label class="grow"><span>Search</span>
        <input name="text" type="search" autocomplete="off" placeholder="title, id, metadata, holder or state" />
      </label>
      <button type="submit">Search</button>
      <label><span>Model</span>
        <select value=${model} onChange=${(event) => setModel(event.currentTarget.value)}>
          <option value="">All models</option>
          ${models.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      <label><span>Sort by</span>
        <select value=${sort.by} onChange=${(event) => sortBy(event.currentTarget.value)}>
          ${Object.keys(SORTS).map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
    </form>
    <${Problem} error=${page.error}><button type="button" onClick=${page.reload}>Try again</button><//>
    ${chosen.size > 0 && html`<${Bulk} chosen=${chosen} onLeft=${(left) => { setChosen(left); page.reload(); }} />`}
    ${page.isLoading && !page.data && html`<${Loading} name="contexts" />`}
    ${page.data && !page.data.length && !page.hasMore && html`<${Nothing} isFiltered=${text || model} />`}
    ${page.data?.length > 0 && html`<${Table} contexts=${page.data} kv=${kv} sort=${sort} onSort=${sortBy} chosen=${chosen} onChoose=${choose} />`}
    <${Pager} page=${page} said=${page.extra?.said} />
  `;
}

const Nothing = ({ isFiltered }) =>
  isFiltered
    ? html`<${Empty} title="No match">No live context has this text in its title, id, metadata, holder or state.<//>`
    : html`<${Empty} title="No contexts yet">
        Create one in the <a href="#/playground">playground</a>, or with <code>POST /v1/context</code>: its answer has the new id.
      <//>`;

// Actions on the chosen contexts. `onLeft` gets those that an action could not change.
function Bulk({ chosen, onLeft }) {
  const [running, setRunning] = useState(null);
  const [isAsked, setIsAsked] = useState(false);
  const [error, setError] = useState(null);
  const run = async (verb, act) => {
    const left = new Map();
    let [done, last] = [0, null];
    setIsAsked(false);
    setError(null);
    setRunning({ verb, done });
    await each(chosen.values(), async (context) => {
      await act(context).catch((refusal) => {
        if (refusal.status === 404 || refusal.status === 410) return;
        last = refusal;
        left.set(context.session_id, context);
      });
      setRunning({ verb, done: (done += 1) });
    });
    setRunning(null);
    if (last) setError({ message: `${plural(left.size, "context")} did not change: ${last.message}` });
    onLeft(left);
  };
  const extend = () => run("Extending", (context) => call("PATCH", contextPath(context.session_id), { body: { ttl: context.ttl } }));
  const drop = () => run("Deleting", (context) => remove(context.session_id));
  return html`<div class="row card bulk" role="group" aria-label="Actions on the selected contexts">
      ${running
        ? html`<span class="grow"><${Elapsed}>${running.verb} ${count(running.done)} of ${count(chosen.size)}<//></span>`
        : html`<span class="grow" role="status">${plural(chosen.size, "context")} selected</span>
          <button type="button" onClick=${extend}>Extend</button>
          <button type="button" class="danger" onClick=${() => setIsAsked(true)}>Delete</button>
          <button type="button" class="quiet" onClick=${() => onLeft(new Map())}>Clear</button>`}
    </div>
    <${Problem} error=${error} />
    ${isAsked && html`<${Confirm} question=${`Delete ${plural(chosen.size, "context")}?`} verb="Delete" onYes=${drop} onNo=${() => setIsAsked(false)}
      detail="This deletes their conversations, and their KV on every sidecar that answers. It cannot be undone." />`}`;
}

// Bytes and tier, which only a read of each context tells: of those that are shown, a few at a time.
function useKV(contexts) {
  const [known, setKnown] = useState({});
  const named = (contexts ?? []).map((context) => `${context.session_id}@${context.generation}`).join(" ");
  useEffect(() => {
    const abort = new AbortController();
    const names = named ? named.split(" ") : [];
    setKnown((before) => Object.fromEntries(names.filter((name) => name in before).map((name) => [name, before[name]])));
    each(names, async (name) => {
      try {
        const { bytes, tiers, holder } = await call("GET", contextPath(name.slice(0, name.lastIndexOf("@"))), { signal: abort.signal });
        setKnown((before) => ({ ...before, [name]: { bytes, tiers, holder } }));
      } catch (error) {
        if (abort.signal.aborted || [0, 429, 503].includes(error.status)) return false; // not the moment for more
      }
      return true;
    });
    return () => abort.abort();
  }, [named]);
  return known;
}

const COLUMNS = ["Context", "Model", "State", "Turns", "Tokens", "Saved", "KV size", "Holder", "Time left"];
const NUMBERS = new Set(["Turns", "Tokens", "KV size"]);

function Table({ contexts, kv, sort, onSort, chosen, onChoose }) {
  const isAll = contexts.every((context) => chosen.has(context.session_id));
  return html`<label class="inline pick-all"><input type="checkbox" checked=${isAll} onChange=${() => onChoose(contexts, !isAll)} /> Select all on this page</label>
  <div class="card"><table role="table" class="list">
    <caption class="hidden">Contexts, ${sort.by === "Newest" ? "newest first" : `sorted by ${sort.by}`}</caption>
    <thead role="rowgroup"><tr role="row">
      <th role="columnheader" scope="col"><span class="hidden">Select</span></th>
      ${COLUMNS.map((name) => html`<th role="columnheader" scope="col" class=${NUMBERS.has(name) ? "number" : ""}
        aria-sort=${sort.by === name ? (sort.way > 0 ? "ascending" : "descending") : null}>${
        SORTS[name] ? html`<button type="button" class="quiet" onClick=${() => onSort(name)}>${name}</button>` : name}</th>`)}
    </tr></thead>
    <tbody role="rowgroup">
      ${contexts.map((context) => html`<${Row} key=${context.session_id} context=${context} kv=${kv[`${context.session_id}@${context.generation}`]}
        isChosen=${chosen.has(context.session_id)} onChoose=${onChoose} />`)}
    </tbody>
  </table></div>`;
}

function Row({ context, kv, isChosen, onChoose }) {
  const [title, id] = [titleOf(context), shortId(context.session_id)];
  const named = Object.entries(context.metadata).filter(([name]) => !title || name !== "title").map(([name, value]) => `${name}: ${value}`);
  const rest = (title ? [id, ...named] : named).join(" · ");
  return html`<tr role="row" class=${isChosen ? "chosen" : ""}>
    <td role="cell" class="pick"><input type="checkbox" aria-label=${`Select ${title || id}`} checked=${isChosen} onChange=${() => onChoose([context], !isChosen)} /></td>
    <td role="cell" class="name">
      <a href=${`#/contexts/${encodeURIComponent(context.session_id)}`} title=${context.session_id}>${title ? html`<span class="cut title">${title}</span>` : html`<code>${id}</code>`}</a>
      <small class="cut" title=${rest}>${rest || `created ${moment(context.created)}`}</small>
    </td>
    <td role="cell" data-name="Model" class="cut">${context.model}</td>
    <td role="cell" data-name="State"><${Tag} kind=${context.state}>${context.state}<//></td>
    <td role="cell" data-name="Turns" class="number">${count(context.turns)}</td>
    <td role="cell" data-name="Tokens" class="number">${count(context.tokens)}</td>
    <td role="cell" data-name="Saved"><${Saved} of=${context} /></td>
    <td role="cell" data-name="KV size" class="number">${kv ? size(kv.bytes) : "…"}<small>${kv ? kv.tiers.map(tierOf).join(", ") || kv.holder.state : ""}</small></td>
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
