// A chat over Vercel's AI SDK: reads one JSON string a line, prints one answer a line (see tests/kit/clients.py).
import { createInterface } from "node:readline";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const { BASE_URL, API_KEY, MODEL, SYSTEM } = process.env;
const provider = createOpenAICompatible({ name: "local", baseURL: BASE_URL, apiKey: API_KEY, includeUsage: true });
const messages = [];

for await (const line of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content: JSON.parse(line) });
  const result = streamText({
    model: provider(MODEL),
    system: SYSTEM,
    messages,
    temperature: 0,
    maxOutputTokens: 12,
    maxRetries: 0,
    onError: ({ error }) => console.error(error),
  });
  const text = await result.text;
  const usage = await result.usage;
  messages.push(...(await result.response).messages);
  console.log(
    JSON.stringify({
      text,
      prompt_tokens: usage.inputTokens,
      cached_tokens: usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens ?? 0,
      answer_tokens: usage.outputTokens,
    }),
  );
}
