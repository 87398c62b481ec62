// The life of a context against the server that the environment names; prints one JSON object (test_typescript_client.py).
import { ApiError, Context, ContextCache, type Event, type Reply } from "context-cache";

const model = process.env.MODEL ?? "";
const client = new ContextCache();

const context = await client.contexts.create({ model, prompt: "Hello", ttl: 60, metadata: { user: "anna" } });
const first = context.reply;
const second = await context.ask(" more", { max_tokens: 8 });
const third = await context.chat([{ role: "user", content: "and more" }], { ifMatch: 2, extra: { top_k: 3 } });
const events: Event[] = [];
for await (const event of context.chatStream("and streamed")) events.push(event);
const fifth = await context.askStream(" and as text").whole();
const info = await context.refresh();
await context.update({ ttl: 120, ttl_policy: "sliding" });
const { ttl, ttl_policy } = await context.refresh();
const branch = await context.fork({ generation: 2 });
const ofBranch = await branch.chat("elsewhere");
const short = await context.compact({ messages: [{ role: "user", content: "Short." }] });
const ofShort = await short.chat("and on");
await context.rewind(1);

const streamed = client.contexts.createStream({ model, messages: [{ role: "user", content: "Hi" }] });
const pieces: string[] = [];
let early: string | undefined;
for await (const event of streamed) {
  early ??= streamed.context?.sessionId;
  if (event.type === "text") pieces.push(event.text);
}
const listed: string[] = [];
for await (const { session_id } of client.contexts.list({ model })) listed.push(session_id);
const again = await client.contexts.get(branch.sessionId);
const shortInfo = await short.refresh();
const { data: messages } = await client.api.POST("/v1/messages", {
  body: { model, max_tokens: 8, session_id: streamed.context?.sessionId ?? null, messages: [{ role: "user", content: "Anthropic's" }] },
});

for (const one of [context, branch, short]) await one.delete();
const refusals: unknown[] = [];
for (const refused of [
  () => client.contexts.get(context.sessionId),
  () => branch.chatStream("gone").whole(),
  () => client.contexts.create({ model, prompt: "x", ttl: 1 }),
  () => client.api.GET("/v1/deployment"),
  () => new Context(client, streamed.context?.sessionId ?? "", model).ask("x", { ifMatch: 1 }),
]) {
  await refused().catch((error: unknown) => {
    if (error instanceof ApiError) {
      refusals.push([error.status, error.code, error.param ?? null, error.requestId !== "", error.message !== ""]);
    }
  });
}

const seen = (reply: Reply | undefined) => reply && [reply.generation, reply.usage.context.cached_tokens, reply.usage.context.saved_share];
const last = events.at(-1);
const fourth = last?.type === "finished" ? last.reply : undefined;
console.log(
  JSON.stringify({
    replies: [first, second, third, fourth, fifth].map(seen),
    branch: seen(ofBranch),
    short: [ofShort.generation, shortInfo.parent, ofShort.usage.context.context_tokens],
    texts: [fourth?.text, events.map((event) => (event.type === "text" ? event.text : "")).join("")],
    context: { id: context.sessionId, turns: info.turns, metadata: info.metadata, recent: info.recent_turns, ttl, ttl_policy },
    streamed: { id: streamed.context?.sessionId, early, text: pieces.join(""), cached: seen(streamed.context?.reply) },
    listed,
    again: [again.model, again.info?.forked_from?.session_id, again.info?.generation],
    messages: [messages?.usage.cache_read_input_tokens, messages?.session_id],
    refusals,
  }),
);

// Mistakes that the types find.
// @ts-expect-error a misspelt option
const _misspelt = () => context.ask("x", { max_token: 8 });
// @ts-expect-error neither prompt nor messages
const _neither = () => client.contexts.create({ model });
// @ts-expect-error both
const _both = () => client.contexts.create({ model, prompt: "x", messages: [] });
// @ts-expect-error no code of an error is called so
const _code = (error: ApiError) => error.code satisfies "context_lost";
