// A chat over Vercel's AI SDK: reads one JSON string a line, prints one answer a line (see tests/kit/clients.py).
import { createInterface } from "node:readline";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const { BASE_URL, API_KEY, MODEL, SYSTEM, CONTEXT } = process.env;
const provider = createOpenAICompatible({ name: "local", baseURL: BASE_URL, apiKey: API_KEY, includeUsage: true });
const messages = [];
let streams = false;

for await (const line of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content: JSON.parse(line) });
  streams = !streams; // every other turn whole
  const result = (streams ? streamText : generateText)({
    model: provider(MODEL),
    system: SYSTEM,
    messages,
    temperature: 0,
    maxOutputTokens: 12,
    maxRetries: 0,
    providerOptions: { local: JSON.parse(CONTEXT) },
    ...(streams && { onError: ({ error }) => console.error(error) }),
  });
  const { text, usage, response } = streams ? await whole(result) : await result;
  messages.push(...response.messages);
  console.log(
    JSON.stringify({
      text,
      prompt_tokens: usage.inputTokens,
      cached_tokens: usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens ?? 0,
      answer_tokens: usage.outputTokens,
    }),
  );
}

async function whole(stream) {
  return { text: await stream.text, usage: await stream.usage, response: await stream.response };
}
