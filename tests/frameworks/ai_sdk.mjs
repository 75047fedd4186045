// The Vercel AI SDK by its four ways to this server: whole, streamed, with tools, structured, embeddings.
//   npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
//   node ai_sdk.mjs http://127.0.0.1:8000 KEY
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [url, apiKey] = process.argv.slice(2);
const at = { baseURL: `${url}/v1`, apiKey };
const openai = createOpenAI(at);
const compatible = createOpenAICompatible({ ...at, name: "headrace", supportsStructuredOutputs: true });
const models = {
  "openai, Responses": openai("demo"),
  "openai, chat": openai.chat("demo"),
  "openai-compatible": compatible("demo"),
  anthropic: createAnthropic(at)("demo"),
};
const get_weather = tool({
  description: "Get the current weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => ({ city, temperature: 21, condition: "sunny" }),
});
const weather = { tools: { get_weather }, prompt: "What is the weather in Paris?", temperature: 0 };

for (const [name, model] of Object.entries(models)) {
  const sum = { model, prompt: "What is 17 + 25?", temperature: 0 };
  assert.equal((await generateText(sum)).text, "42");
  const streamed = streamText(sum);
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, "42");
  assert.equal(await streamed.finishReason, "stop");
  const turns = await generateText({ ...weather, model, stopWhen: stepCountIs(4) });
  assert.equal(turns.steps.length, 2);
  assert.match(turns.text, /Paris/);
  assert.equal(await streamText({ ...weather, model, stopWhen: stepCountIs(4) }).text, turns.text);
  const forced = await generateText({ ...weather, model, toolChoice: "required" });
  assert.deepEqual(forced.toolCalls.map((call) => call.input), [{ city: "Paris" }]);
  const schema = z.object({ name: z.string(), age: z.number().int() });
  const typed = { ...sum, prompt: "A person named Ann, aged 30.", output: Output.object({ schema }) };
  assert.equal((await generateText(typed)).output.age, 30);
  console.log(`${name}: passed`);
}
assert.ok((await embed({ model: openai.embedding("demo"), value: "hi" })).embedding.length > 0);
await assert.rejects(generateText({ model: compatible("other"), prompt: "x", maxRetries: 0 }), { name: "AI_APICallError" });
console.log("embeddings, errors: passed");
