// What is kept of requests without a context: found again by its tokens, for keys that ask for it.

import { html, useState } from "./htm-preact.js";
import { call, contextPath } from "./api.js";
import { Pager } from "./contexts.js";
import { usePages } from "./pages.js";
import { Confirm, Empty, Loading, Problem, useTitle } from "./pieces.js";
import { count, moment, percent, shortId, size, span } from "./words.js";

const load = (after, signal) =>
  call("GET", `/v1/context?${new URLSearchParams({ kind: "kept", limit: 25, ...(after && { after }) })}`, { signal });

export function Kept() {
  const head = useTitle("Kept conversations");
  const page = usePages("kept", load);
  const [leaving, setLeaving] = useState(null);
  const [error, setError] = useState(null);
  const drop = async () => {
    const { id } = leaving;
    setLeaving(null);
    await call("DELETE", contextPath(id)).then(() => setError(null), setError);
    page.reload();
  };
  const away = page.extra?.unreachable ?? [];
  return html`
    <h1 ref=${head} tabindex="-1">Kept conversations</h1>
    <p class="lead">KV of requests without a context, for API keys with <code>"plain": "keep"</code>. The next request with the same beginning reuses it. The usage of each answer has its cached tokens.</p>
    <${Problem} error=${error ?? page.error} />
    ${away.length > 0 && html`<p class="note">These pods do not answer, so their conversations are missing: ${away.join(", ")}.</p>`}
    ${page.isLoading && !page.data && html`<${Loading} name="kept conversations" />`}
    ${page.data && !page.data.length && html`<${Empty} title="No kept conversations">This key does not keep requests without a context, or sent none in the last hour.<//>`}
    ${page.data?.length > 0 && html`<div class="card"><table role="table" class="list">
      <caption class="hidden">Kept conversations, last used first</caption>
      <thead role="rowgroup"><tr role="row">
        ${["Conversation", "Tokens", "KV size", "Pods", "Last used", "Expires in", "Last miss", ""].map((name, at) =>
          html`<th role="columnheader" scope="col" class=${at === 1 || at === 2 ? "number" : ""}>${name || html`<span class="hidden">Actions</span>`}</th>`)}
      </tr></thead>
      <tbody role="rowgroup">${page.data.map((kept) => html`<tr role="row" key=${kept.id}>
        <td role="cell" class="name"><code title=${kept.id}>${shortId(kept.id)}</code></td>
        <td role="cell" data-name="Tokens" class="number">${count(kept.tokens)}</td>
        <td role="cell" data-name="KV size" class="number">${size(kept.bytes)}</td>
        <td role="cell" data-name="Pods" class="cut">${kept.pods.join(", ")}</td>
        <td role="cell" data-name="Last used">${moment(kept.last_used)}</td>
        <td role="cell" data-name="Expires in" class="number">${span(kept.expires_at - Date.now() / 1000)}</td>
        <td role="cell" data-name="Last miss">${missOf(kept.last_miss)}</td>
        <td role="cell"><button type="button" class="quiet" onClick=${() => setLeaving(kept)} aria-label=${`Delete ${kept.id}`}>Delete</button></td>
      </tr>`)}</tbody>
    </table></div>`}
    <${Pager} page=${page} said="" />
    ${leaving && html`<${Confirm} question="Delete this conversation?" detail=${`${leaving.id}: the next request with this beginning computes its whole prompt.`} verb="Delete" onYes=${drop} onNo=${() => setLeaving(null)} />`}
  `;
}

const missOf = (miss) =>
  miss ? `${percent(miss.of ? miss.matched / miss.of : null)} matched: ${count(miss.matched)} of ${count(miss.of)} tokens; the first difference was token ${count(miss.diverged_at_token)}` : "–";
