/** Names for the generated types that this client's objects show. */
import type { components } from "./api.js";

export type Schemas = components["schemas"];
/** A chat message, as OpenAI has it. */
export type Message = Schemas["Message"] & Record<string, unknown>;
/** Text, or token ids. */
export type Prompt = string | number[];
/** A context, as a read shows it. */
export type ContextInfo = Schemas["ReadContext"];
/** A context, as a list shows it. */
export type ListedContext = Schemas["ListedContext"];
/** Receipt of a committed turn. */
export type Turn = Schemas["TurnObject"];
/** `usage.context`: tokens that the context saved. */
export type ContextUsage = Schemas["ContextUsage"];
/** Tokens of one answer. An answer without a context counts as a turn that reused nothing and is not committed. */
export type Usage = Omit<Schemas["Usage"], "context"> & { context: ContextUsage };
