// How numbers, times and the API's words are told to a person. Pure.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const compact = (number) => short.format(number);

export const count = (number) => (number == null ? "–" : whole.format(number));

export function size(bytes) {
  if (bytes == null) return "–";
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${bytes >= 100 || unit === 0 ? whole.format(bytes) : bytes.toFixed(1)} ${UNITS[unit]}`;
}

// Storage over time, to three digits: a small figure is no zero.
export function gibHours(byteHours) {
  const hours = byteHours / 2 ** 30;
  return hours > 0 && hours < 0.001 ? "< 0.001" : String(Number(hours.toPrecision(3)));
}

export function milliseconds(ms) {
  if (ms == null) return "–";
  return ms < 1000 ? `${whole.format(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

// A share, 0 to 1. What is not everything is not called 100 %.
export function percent(share) {
  if (share == null) return "–";
  return share > 0.99 && share < 1 ? `${Math.min(99.9, 100 * share).toFixed(1)} %` : `${(100 * share).toFixed(0)} %`;
}

export const duration = (seconds) => (seconds < 90 ? `${seconds.toFixed(1)} s` : span(seconds));

// A tick of an axis, in the unit of its largest one and without needless zeros.
export function tick(ms, most) {
  if (most < 1000) return `${whole.format(ms)} ms`;
  return `${Number((ms / 1000).toFixed(2))} s`;
}

export function span(seconds) {
  if (seconds <= 0) return "expired";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const moment = (unixS) =>
  unixS ? new Date(unixS * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "–";

export const day = (unixS) => new Date(unixS * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

export const shortId = (id) => (id.length > 20 ? `${id.slice(0, 12)}…${id.slice(-4)}` : id);

// Title that a client gave a context as metadata; empty: none.
export const titleOf = (context) => context.metadata.title?.trim() ?? "";

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

const SOURCES = {
  __proto__: null,
  device: "the engine’s own cache",
  host: "the sidecar’s memory",
  disk: "the sidecar’s disk",
  peer: "another pod’s sidecar",
  object: "the shared store",
  recompute: "nowhere: no KV was stored",
  none: "nowhere: no KV to reuse",
};
export const sourceOf = (source) => SOURCES[source] ?? source ?? "–";

const TIERS = { __proto__: null, host: "memory", disk: "disk", object: "shared store" };
export const tierOf = (tier) => TIERS[tier] ?? tier;

const REASONS = {
  __proto__: null,
  arena_full: "the sidecar’s memory was full",
  cache_ref_not_found: "no sidecar has the KV any more",
  cache_ref_pending: "the KV was still being saved or pulled",
  corrupt_block: "a stored block had a wrong checksum and went to quarantine",
  fingerprint_mismatch: "the KV is from another model, version or layout",
  generation_mismatch: "the context was at another generation",
  key_not_at_hand: "the tenant’s key for the shared store was missing",
  lease_lost: "the turn’s lease had ended before the commit",
  load_deadline: "the load of the KV reached its deadline",
  no_manifest: "no KV was saved",
  pull_failed: "the pull from the other pod’s sidecar failed",
  queue_full: "the sidecar had too many saves waiting",
  read_only: "the request asked for no commit",
  seal_deadline: "the save reached its deadline and may still end",
  sidecar_unavailable: "the sidecar did not answer",
  slower_than_computing: "loading would have taken longer than computing",
  storage_full: "the sidecar’s storage was full",
  store_unavailable: "the context manager or its Redis did not answer",
  unsupported_layers: "KV of this model is not supported",
};
export const reasonOf = (reason) => REASONS[reason] ?? reason?.replaceAll("_", " ");

const DIVERGED = {
  regenerated: "the last answer is generated again",
  head_changed: "the system prompt or the tools changed",
  inserted: "a message was inserted",
  trimmed: "older messages were removed",
  window: "it begins in the middle of the conversation",
  edited: "an earlier message was edited",
  compacted: "the history was summarised",
  respelled: "the same text is spelled differently",
  other: "the text differs",
};

// Why a turn computed what it computed, in a sentence.
export function whyOf(turn) {
  if (turn.error) return turn.error;
  if (turn.kind === "create") return turn.reason ? `Not kept: ${reasonOf(turn.reason)}.` : turn.cached ? "Its beginning was computed before." : "The first turn computes its whole prompt.";
  if (turn.diverged)
    return `Differs from the conversation from token ${count(turn.diverged.token)}: ${DIVERGED[turn.diverged.why] ?? turn.diverged.why}.`;
  if (turn.committed === false) return `Not committed: ${reasonOf(turn.reason) ?? "unknown reason"}.`;
  if (turn.reason) return `${turn.cached ? "In part" : "Computed again"}: ${reasonOf(turn.reason)}.`;
  if (turn.cached) return `From ${sourceOf(turn.source)}${turn.restoreMs ? `, in ${milliseconds(turn.restoreMs)}` : ""}.`;
  return `Reused from ${sourceOf(turn.source)}.`;
}

export function verdictOf(turn) {
  if (turn.kind === "create") return turn.cached ? "hit" : "cold";
  const wanted = Math.min(turn.contextTokens, turn.cached + turn.computed - 1);
  if (turn.cached >= Math.max(wanted - 1, 1)) return "hit";
  return turn.cached ? "partial" : "miss";
}
