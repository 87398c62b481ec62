// The deployment as an operator's key sees it: pods, tenants, turns a minute. With any other key, what its own tenant used.

import { html, useEffect, useState } from "./htm-preact.js";
import { call } from "./api.js";
import { Pager } from "./contexts.js";
import { usePages } from "./pages.js";
import { Empty, Fact, Problem, Tag, useEvery, useTitle } from "./pieces.js";
import { count, gibHours, plural, size, tierOf } from "./words.js";

const REFRESH_MS = 5_000;
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

// Pods and limits are known where the manager is away, and are shown then.
const usageOf = (tenant, signal) =>
  call("GET", `/v1/usage${tenant && `?tenant=${encodeURIComponent(tenant)}`}`, { signal }).catch((refusal) => {
    if (signal.aborted) throw refusal;
    return null;
  });

export function Operations() {
  const head = useTitle("Operations");
  const page = usePages("deployment", look);
  const [looks, setLooks] = useState({ now: null, before: null });
  useEffect(() => page.extra?.pods && setLooks((shown) => ({ now: page.extra, before: shown.now })), [page.extra]);
  const own = page.extra?.own;
  const isOperator = page.error?.code !== "operator_only" && (!own || own.operator);
  useEvery(REFRESH_MS, () => page.reload());
  return html`
    <h1 ref=${head} tabindex="-1">Operations</h1>
    ${isOperator
      ? html`<${Problem} error=${page.error} />`
      : html`<${Empty} title="For operators">Only an operator’s key shows pods and tenants. This key shows the usage of its own tenant.<//>`}
    ${looks.now && html`<h2>Pods</h2><${Pods} pods=${looks.now.pods} />
      <h2>Tenants</h2><${Tenants} looks=${looks} /><${Pager} page=${page} said="" />`}
    ${own && html`<h2>Usage of ${own.tenant} today</h2><${Usage} usage=${own} />`}
  `;
}

// `rows`: cells by row, the first its name. Numbers are what is not said to be text.
const Table = ({ caption, heads, rows, text = [] }) => html`<div class="card"><table role="table" class="list">
  <caption class="hidden">${caption}</caption>
  <thead role="rowgroup"><tr role="row">${heads.map((name, at) =>
    html`<th role="columnheader" scope="col" class=${at && !text.includes(at) ? "number" : ""}>${name}</th>`)}</tr></thead>
  <tbody role="rowgroup">${rows.map(([name, ...cells]) => html`<tr role="row" key=${name}>
    <td role="cell" class="name">${name}</td>
    ${cells.map((cell, at) => html`<td role="cell" data-name=${heads[at + 1]} class=${text.includes(at + 1) ? "" : "number"}>${cell}</td>`)}
  </tr>`)}</tbody>
</table></div>`;

const percent = (share) => `${(100 * share).toFixed(0)} %`;
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
      heads=${["Pod", "State", "Models", "Running", "Waiting", "Engine KV", "Sidecar tiers"]} />
    ${kinds > 1 && html`<p class="note">The pods have ${kinds} kinds of KV. A pod cannot reuse the KV of another kind.</p>`}`;
}

function Tenants({ looks: { now, before } }) {
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
      count(used?.computed_tokens),
      count(used?.cached_tokens),
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
      heads=${["Tenant", "Keys", "Contexts", "Turns today", "Turns/min", "Computed", "Cached", "GiB·h", "In flight"]} />
    <p class="note">${limits.length ? `Limits of a tenant at one gateway: ${limits.join(", ")}.` : "Tenants have no limit on requests."} In flight: requests in progress.
      GiB·h: stored KV today, in GiB times hours. Turns/min: since the previous refresh.</p>`;
}

const held = (used) => Object.values(used.byte_hours).reduce((sum, bytes) => sum + bytes, 0);

// What was used, by API key: what belongs to no key is bytes that were held.
function Usage({ usage }) {
  const named = usage.days.flatMap(({ keys }) => keys.map((used) => [used.key || "(stored KV)", used]));
  if (!named.length) return html`<${Empty} title="Nothing used yet">This table shows today’s turns, by API key.<//>`;
  const rows = [...named, ["Total", usage.total]].map(([name, used]) => [
    name,
    ...[used.contexts, used.turns, used.computed_tokens, used.cached_tokens, used.completion_tokens].map(count),
    `${used.saved_seconds.toFixed(1)} s`,
    gibHours(held(used)),
  ]);
  return html`<${Table} caption="Usage today, by API key" rows=${rows}
    heads=${["API key", "Contexts", "Turns", "Computed", "Cached", "Answered", "Saved", "GiB·h"]} />`;
}
