// Turns: saved share, computed against cached tokens, what each took, and why.

import { html } from "./htm-preact.js";
import { Tag, TokenBar } from "./pieces.js";
import { clock, count, milliseconds, percent, verdictOf, whyOf } from "./words.js";

export function TurnList({ turns }) {
  const most = Math.max(...turns.map((turn) => turn.cached + turn.computed));
  // Only the playground times a cold prompt beside a turn.
  const timesCold = turns.some((turn) => turn.coldMs != null || turn.coldError);
  const heads = ["Turn", "Saved", "Cached tokens", "Computed tokens", "First token", ...(timesCold ? ["Cold"] : []), "Total time", "Why"];
  return html`<div class="card"><table role="table" class="list turns">
    <caption class="hidden">Turns</caption>
    <thead role="rowgroup"><tr role="row">
      ${heads.map((name, at) => html`<th role="columnheader" scope="col" class=${at > 1 && name !== "Why" ? "number" : ""}>${name}</th>`)}
    </tr></thead>
    <tbody role="rowgroup">${turns.map((turn) => html`<tr role="row" key=${`${turn.generation} ${turn.at}`}>
      <td role="cell" class="name"><span class="number">${turn.generation ?? "–"}</span> ${turn.kind} <${Tag} kind=${verdictOf(turn)}>${verdictOf(turn)}<//>
        <small class="number">${clock(turn.at)}</small></td>
      <td role="cell" class="wide" data-name="Saved"><span class="share"><${TokenBar} cached=${turn.cached} computed=${turn.computed} most=${most} /><span class="number">${percent(turn.savedShare)}</span></span></td>
      <td role="cell" data-name="Cached tokens" class="number">${count(turn.cached)}</td>
      <td role="cell" data-name="Computed tokens" class="number">${count(turn.computed)}</td>
      <td role="cell" data-name="First token" class="number">${milliseconds(turn.ttftMs)}</td>
      ${timesCold && html`<td role="cell" data-name="Cold" class="number" title=${turn.coldError ?? ""}>${milliseconds(turn.coldMs)}</td>`}
      <td role="cell" data-name="Total time" class="number">${milliseconds(turn.totalMs)}</td>
      <td role="cell" data-name="Why" class="why">${whyOf(turn)}</td>
    </tr>`)}</tbody>
  </table></div>
  <p class="legend" aria-hidden="true"><i class="cached"></i> cached <i class="computed"></i> computed. A full bar is the longest prompt.</p>`;
}
