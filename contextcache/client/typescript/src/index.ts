/**
 * TypeScript client of the public HTTP API (docs/sdks/typescript.md).
 *
 * `api.ts` has the types, generated from the OpenAPI document. `transport.ts` has deadlines and retries. `reply.ts` reads
 * answers and streams. `contexts.ts` has the objects.
 */
export type { components, operations, paths } from "./api.js";
export { Context, ContextCache, Contexts, ReplyStream } from "./contexts.js";
export type { CompactOptions, CreateOptions, ForkOptions, TurnOptions } from "./contexts.js";
export { ApiError, BrokenStream, ConnectionFailed, ContextCacheError, NotCreated, NotUnderstood } from "./errors.js";
export type { ErrorCode } from "./errors.js";
export type { Event, Finished, Reply, TextDelta, ToolCallDelta } from "./reply.js";
export type { Options } from "./transport.js";
export type { ContextInfo, ContextUsage, ListedContext, Message, Turn, Usage } from "./types.js";
