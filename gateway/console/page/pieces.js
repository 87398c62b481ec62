// What several views are made of.

import { html, useEffect, useRef, useState } from "./htm-preact.js";
import { count, duration, percent, span } from "./words.js";

export const useTitle = (title) => {
  const head = useRef(null);
  useEffect(() => {
    document.title = `${title} · context-cache`;
    head.current?.focus({ preventScroll: true });
  }, [title]);
  return head;
};

export const Problem = ({ error, children }) =>
  error && html`<div class="problem" role="alert"><p>${error.message}</p>${children}</div>`;

export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2><p>${children}</p></div>`;

export const Tag = ({ kind, children }) => html`<span class=${`tag ${kind ?? ""}`}>${children}</span>`;

export const Fact = ({ name, children }) => html`<div class="fact"><dt>${name}</dt><dd>${children}</dd></div>`;

// A share as a bar, for the eye alone: the words beside it say the same.
const Meter = ({ share, isLate, children }) => html`<span class=${isLate ? "meter late" : "meter"}>
  <span class="track" aria-hidden="true"><span style=${{ width: `${(Math.max(0, Math.min(1, share)) * 100).toFixed(1)}%` }}></span></span>
  <span class="number">${children}</span>
</span>`;

export function Life({ expiresAt, ttl }) {
  const left = expiresAt - Date.now() / 1000;
  return html`<${Meter} share=${left / ttl} isLate=${left / ttl < 0.15}>${span(left)}<//>`;
}

// Prompt tokens that were not computed, of a context, a key, a model or a tenant: share, tokens and seconds, as the server sums them.
export const Saved = ({ of }) => html`<${Meter} share=${of.saved_share ?? 0}>${percent(of.saved_share)}<//>
  ${of.saved_share != null && html`<small class="number">${count(of.cached_tokens)} tokens, ${duration(of.saved_seconds)}</small>`}`;

export const SavedNote = () => html`<p class="lead">Saved: share of the prompt tokens that the engine reused instead of computing, then their number and the estimated time to compute them.</p>`;

// How long a person has waited: from when this is first drawn.
export function Elapsed({ children }) {
  const began = useRef(performance.now());
  const [, again] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => again((times) => times + 1), 100);
    return () => clearInterval(timer);
  }, []);
  return html`<span class="note elapsed" role="timer">${children} <span class="number">${((performance.now() - began.current) / 1000).toFixed(1)} s</span></span>`;
}

export const Loading = ({ name }) => html`<p class="late"><${Elapsed}>Loading ${name}…<//></p>`;

// Computed against cached tokens of a turn, on one scale with the others of its context.
export function TokenBar({ computed, cached, most }) {
  const width = (tokens) => ({ width: `${most ? (100 * tokens) / most : 0}%` });
  return html`<span class="tokens" aria-hidden="true">
    <span class="cached" style=${width(cached)}></span><span class="computed" style=${width(computed)}></span>
  </span>`;
}

export function Copy({ text, what }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => setCopied(true), () => {});
  useEffect(() => {
    const timer = copied && setTimeout(() => setCopied(false), 1500);
    return () => clearTimeout(timer);
  }, [copied]);
  return html`<button type="button" onClick=${copy}>${copied ? "Copied" : `Copy ${what}`}</button>`;
}

// A question before what cannot be taken back. Escape says no.
export function Confirm({ question, detail, verb, onYes, onNo }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="question">
    <h2 id="question">${question}</h2>
    <p>${detail}</p>
    <div class="row end">
      <button type="button" onClick=${onNo} autofocus>Cancel</button>
      <button type="button" class="danger" onClick=${onYes}>${verb}</button>
    </div>
  </dialog>`;
}

// Do something again and again while the tab is looked at; not before the last time has ended.
export function useEvery(intervalMs, act) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    let [timer, isOver] = [0, false];
    const next = async () => {
      if (!document.hidden) await latest.current();
      if (!isOver) timer = setTimeout(next, intervalMs);
    };
    timer = setTimeout(next, intervalMs);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [intervalMs]);
}
