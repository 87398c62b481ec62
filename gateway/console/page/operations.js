// The deployment as an operator's key sees it: pods, tenants, turns a minute. With any key, what a tenant used and saved.

import { html, useEffect, useState } from "./htm-preact.js";
import { call } from "./api.js";
import { Chart } from "./chart.js";
import { Pager } from "./contexts.js";
import { usePages } from "./pages.js";
import { Empty, Loading, Problem, Saved, SavedNote, Tag, useEvery, useTitle } from "./pieces.js";
import { compact, count, gibHours, percent, plural, size, tierOf } from "./words.js";

const REFRESH_MS = 5_000;
const LOOKS_MAX = 360; // half an hour of them
const HISTORY_DAYS = 31; // the most that one call reads
const HISTORY_REFRESH_MS = 300_000;
const DAY_S = 86_400;
const TENANTS_SHOWN = 20; // each costs the manager a read

// What this key's tenant used, and of an operator's what there is: another key does not ask for that.
const look = async (after, signal) => {
  const own = await usageOf("", signal);
  if (own && !own.operator) return { data: [], has_more: false, own };
  const seen = await call("GET", `/v1/deployment?limit=${TENANTS_SHOWN}&after=${encodeURIComponent(after)}`, { signal });
  const usage = await Promise.all(seen.tenants.map(({ tenant }) => usageOf(tenant, signal)));
  const data = seen.tenants.map((tenant, at) => ({ ...tenant, usage: usage[at] }));
  return { data, has_more: seen.has_more, last_id: seen.last_tenant, pods: seen.pods, limits: seen.limits, at: Date.now(), own };
};

const usagePath = (tenant, days) => `/v1/usage?${new URLSearchParams({ ...(tenant && { tenant }), ...days })}`;

// Pods and limits are known where the manager is away, and are shown then.
const usageOf = (tenant, signal) =>
  call("GET", usagePath(tenant), { signal }).catch((refusal) => {
    if (signal.aborted) throw refusal;
    return null;
  });

export function Operations() {
  const head = useTitle("Operations");
  const page = usePages("deployment", look);
  const [looks, setLooks] = useState([]);
  const [tenant, setTenant] = useState("");
  // The looks of one page of tenants: turns a minute are differences between them.
  useEffect(() => page.extra?.pods && setLooks((seen) => [...seen, page.extra].slice(-LOOKS_MAX)), [page.extra]);
  const now = looks.at(-1);
  const own = page.extra?.own;
  const usages = [own, ...(now?.data ?? []).map((one) => one.usage)].filter(Boolean);
  const tenants = [...new Set(now ? usages.map((one) => one.tenant) : [])].sort();
  const used = [...usages].sort((one, other) => other.total.turns - one.total.turns)[0];
  const usage = usages.find((one) => one.tenant === tenant) ?? used; // a chosen tenant may be on another page
  const isOperator = page.error?.code !== "operator_only" && (!own || own.operator);
  useEvery(REFRESH_MS, () => page.reload());
  return html`
    <h1 ref=${head} tabindex="-1">Operations</h1>
    <${SavedNote} />
    ${isOperator
      ? html`<${Problem} error=${page.error} />`
      : html`<p class="note">Only an operator’s key shows pods and tenants. This key shows the usage of its own tenant.</p>`}
    ${page.isLoading && !page.extra && html`<${Loading} name="the deployment" />`}
    ${now && html`<h2>Pods</h2><${Pods} pods=${now.pods} /><${Load} looks=${looks} />
      <h2>Tenants</h2><${Tenants} now=${now} before=${looks.at(-2)} /><${Pager} page=${page} said="" />`}
    ${own && html`<div class="row head saved-head"><h2>Saved by ${usage.tenant}</h2>
        ${tenants.length > 0 && html`<label class="inline">Tenant <select value=${usage.tenant} onChange=${(event) => setTenant(event.currentTarget.value)}>
          ${tenants.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`}</div>
      <${History} key=${usage.tenant} tenant=${usage.tenant} />
      <h2>Usage of ${usage.tenant} today</h2><${Usage} usage=${usage} />`}
  `;
}

// `rows`: cells by row, the first its name. Numbers are what is not said to be text.
const Table = ({ caption, heads, rows, text = [] }) => html`<div class="card"><table role="table" class="list">
  <caption class="hidden">${caption}</caption>
  <thead role="rowgroup"><tr role="row">${heads.map((name, at) =>
    html`<th role="columnheader" scope="col" class=${at && !text.includes(at) ? "number" : ""}>${name}</th>`)}</tr></thead>
  <tbody role="rowgroup">${rows.map(([name, ...cells]) => html`<tr role="row">
    <td role="cell" class="name">${name}</td>
    ${cells.map((cell, at) => html`<td role="cell" data-name=${heads[at + 1]} class=${text.includes(at + 1) ? "" : "number"}>${cell}</td>`)}
  </tr>`)}</tbody>
</table></div>`;

const STATES = { ready: ["ready", "ready"], draining: ["partial", "draining"], not_ready: ["miss", "not ready"] };

function Pods({ pods }) {
  const kinds = new Set(pods.map(({ fingerprint }) => fingerprint).filter(Boolean)).size;
  const rows = pods.map(({ name, state, models, engine, tiers }) => [
    name,
    html`<${Tag} kind=${STATES[state][0]}>${STATES[state][1]}<//>`,
    models.join(", ") || "–",
    count(engine.running),
    count(engine.waiting),
    percent(engine.kv_usage),
    Object.entries(tiers).map(([tier, share]) => `${tierOf(tier)} ${percent(share)}`).join(", ") || "–",
  ]);
  if (!rows.length) return html`<${Empty} title="No pods">The gateway has found no pod yet.<//>`;
  return html`<${Table} caption="Pods" text=${[1, 2, 6]} rows=${rows}
      heads=${["Pod", "State", "Models", "Requests running", "Requests waiting", "Engine KV used", "Sidecar tiers used"]} />
    ${kinds > 1 && html`<p class="note">The pods have ${kinds} kinds of KV. A pod cannot reuse the KV of another kind.</p>`}`;
}

// Requests in the pods since this page was opened, and turns of the shown tenants.
function Load({ looks }) {
  if (looks.length < 2) return null;
  const sum = (pods, what) => pods.reduce((total, { engine }) => total + engine[what], 0);
  const turnsOf = ({ data }) => data.reduce((total, { usage }) => total + (usage?.total.turns ?? 0), 0);
  const rates = looks.slice(1).map((look, at) => {
    const minutes = (look.at - looks[at].at) / 60_000;
    return look.data[0]?.tenant === looks[at].data[0]?.tenant ? Math.max(0, turnsOf(look) - turnsOf(looks[at])) / Math.max(minutes, 1 / 60) : null;
  });
  const [x, last] = [looks.slice(1).map(({ at }) => at / 1000), looks.at(-1)];
  const told = `Since this page was opened: ${count(sum(last.pods, "running"))} requests running, ${count(sum(last.pods, "waiting"))} waiting, ${count(rates.at(-1))} turns a minute.`;
  const lines = ["running", "waiting"].map((what, at) => ({ label: what, colour: at ? "computed" : "cached", values: looks.slice(1).map(({ pods }) => sum(pods, what)) }));
  lines.push({ label: "turns a minute", colour: "accent", dash: [5, 4], values: rates });
  return html`<div class="card"><h3>Requests in pods, and turns a minute</h3>
    <${Chart} told=${told} x=${x} lines=${lines} time="local" least=${4} format=${count} tick=${count} /></div>`;
}

// What a tenant saved, day by day: the last month.
function History({ tenant }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const read = () => {
    const [to, from] = [0, HISTORY_DAYS - 1].map((days) => new Date(Date.now() - days * DAY_S * 1000).toISOString().slice(0, 10));
    return call("GET", usagePath(tenant, { from, to })).then((usage) => (setFound(usage), setError(null)), setError);
  };
  useEffect(() => void read(), []);
  useEvery(HISTORY_REFRESH_MS, read);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} name=${`the last ${HISTORY_DAYS} days`} />`;
  if (!found.total.turns) return html`<${Empty} title="No turns yet">No turn ended in the last ${HISTORY_DAYS} days.<//>`;
  const byDay = new Map(found.days.map(({ day, total }) => [Date.parse(day) / 1000, total]));
  const [first, last] = [Math.min(...byDay.keys()), Math.max(...byDay.keys())];
  const x = Array.from({ length: Math.max(7, (last - first) / DAY_S + 1) }, (_, at) => last - at * DAY_S).reverse();
  const line = (label, colour, value) => ({ label, colour, values: x.map((day) => (byDay.has(day) ? value(byDay.get(day)) : null)) });
  const told = `${percent(found.total.saved_share)} of ${count(found.total.cached_tokens + found.total.computed_tokens)} prompt tokens were not computed.`;
  return html`<p>Last ${HISTORY_DAYS} days: <${Saved} of=${found.total} /></p>
    <div class="charts">
      <div class="card"><h3>Saved share by day</h3>
        <${Chart} told=${told} x=${x} time="utc" most=${1} format=${percent} tick=${percent} lines=${[line("saved", "cached", (total) => total.saved_share)]} /></div>
      <div class="card"><h3>Prompt tokens by day</h3>
        <${Chart} told=${told} x=${x} time="utc" format=${count} tick=${compact}
          lines=${[line("not computed", "cached", (total) => total.cached_tokens), line("computed", "computed", (total) => total.computed_tokens)]} /></div>
    </div>
    <h2>By model, last ${HISTORY_DAYS} days</h2>
    <${UsageTable} caption=${`Usage by model, last ${HISTORY_DAYS} days`} head="Model" rows=${found.models.map((used) => [used.model, used])} />`;
}

function Tenants({ now, before }) {
  const then = new Map((before?.data ?? []).map(({ tenant, usage }) => [tenant, usage]));
  const perMinute = ({ tenant, usage }) => {
    const earlier = then.get(tenant);
    if (!usage || !earlier) return "…";
    return count((Math.max(0, usage.total.turns - earlier.total.turns) * 60_000) / Math.max(1, now.at - before.at));
  };
  const rows = now.data.map((one) => {
    const used = one.usage?.total;
    return [
      one.tenant,
      count(one.num_keys),
      count(one.usage?.contexts_now),
      count(used?.turns),
      perMinute(one),
      used ? html`<${Saved} of=${used} />` : "–",
      used ? gibHours(held(used)) : "–",
      count(one.requests_in_hand),
    ];
  });
  const { requests_per_second: rate, burst, requests_in_hand: requests, bytes_in_hand: bytes } = now.limits;
  const limits = [
    rate ? `${count(rate)} requests per second (burst ${count(burst)})` : "",
    requests ? `${plural(requests, "request")} in flight` : "",
    bytes ? `${size(bytes)} of bodies` : "",
  ].filter(Boolean);
  return html`<${Table} caption="Tenants" rows=${rows}
      heads=${["Tenant", "Keys", "Contexts", "Turns today", "Turns/min", "Saved today", "Stored GiB·h", "Requests in flight"]} />
    <p class="note">${limits.length ? `Limits of a tenant at one gateway: ${limits.join(", ")}.` : "Tenants have no limit on requests."} Turns/min: since the previous refresh.</p>`;
}

const held = (used) => Object.values(used.byte_hours).reduce((sum, bytes) => sum + bytes, 0);

// What was used, by API key: what belongs to no key is bytes that were held.
function Usage({ usage }) {
  const named = usage.days.flatMap(({ keys }) => keys.map((used) => [used.key || "(stored KV)", used]));
  if (!named.length) return html`<${Empty} title="Nothing used yet">This table shows today’s turns, by API key.<//>`;
  return html`<${UsageTable} caption="Usage today, by API key" head="API key" rows=${[...named, ["Total", usage.total]]} />`;
}

const UsageTable = ({ caption, head, rows }) => html`<${Table} caption=${caption}
  heads=${[head, "Contexts", "Turns", "Computed tokens", "Saved", "Answer tokens", "Stored GiB·h"]}
  rows=${rows.map(([name, used]) => [
    name,
    ...[used.contexts, used.turns, used.computed_tokens].map(count),
    html`<${Saved} of=${used} />`,
    count(used.completion_tokens),
    gibHours(held(used)),
  ])} />`;
