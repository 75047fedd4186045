// The official clients of Node against a running server: both dialects, streamed and whole, with tools and errors.
// Prints one line per check and ends with status 1 at the first that fails.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, key] = process.argv.slice(2);
const claude = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const gpt = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const model = "demo";
const parameters = {
  type: "object",
  properties: { city: { type: "string", description: "The name of the city" } },
  required: ["city"],
};
const description = "Get the current weather in a city";
const result = JSON.stringify({ city: "Paris", temperature: 18, condition: "sunny" });

const checks = {
  async chat() {
    const asked = { model, temperature: 0, max_tokens: 100, messages: [{ role: "user", content: "What is 17 + 25?" }] };
    const whole = await gpt.chat.completions.create(asked);
    assert.match(whole.choices[0].message.content, /42/);
    const folded = await gpt.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(folded.choices[0].message.content, whole.choices[0].message.content);
  },
  async functions() {
    const functions = [{ name: "get_weather", description, parameters }];
    const asked = { model, temperature: 0, max_tokens: 200, functions, messages: [{ role: "user", content: "What is the weather in Paris?" }] };
    const whole = (await gpt.chat.completions.create(asked)).choices[0];
    assert.deepEqual([whole.finish_reason, whole.message.function_call.name], ["function_call", "get_weather"]);
    assert.equal(JSON.parse(whole.message.function_call.arguments).city, "Paris");
    const folded = (await gpt.chat.completions.stream(asked).finalChatCompletion()).choices[0];
    assert.deepEqual(folded.message.function_call, whole.message.function_call);
    const messages = [...asked.messages, whole.message, { role: "function", name: "get_weather", content: result }];
    assert.match((await gpt.chat.completions.create({ ...asked, messages })).choices[0].message.content, /18/);
  },
  async completions() {
    const asked = { model, temperature: 0, max_tokens: 20, prompt: "Once upon" };
    const whole = await gpt.completions.create(asked);
    let text = "";
    for await (const chunk of await gpt.completions.create({ ...asked, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
  },
  async embeddings() {
    const coded = await gpt.embeddings.create({ model, input: ["one", "two"] });
    const plain = await gpt.embeddings.create({ model, input: ["one", "two"], encoding_format: "float" });
    coded.data.forEach((row, i) => row.embedding.forEach((x, k) => assert.ok(Math.abs(x - plain.data[i].embedding[k]) < 1e-5)));
  },
  async models() {
    assert.deepEqual((await gpt.models.list()).data.map((one) => one.id), [model]);
    assert.equal((await gpt.models.retrieve(model)).id, model);
    await assert.rejects(gpt.models.retrieve("other"), OpenAI.NotFoundError);
    assert.equal((await claude.models.retrieve(model)).id, model);
  },
  async filesAndBatches() {
    const line = { custom_id: "a", method: "POST", url: "/v1/completions", body: { prompt: "Once", max_tokens: 2 } };
    const text = JSON.stringify(line) + "\n";
    const given = await gpt.files.create({ file: await OpenAI.toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
    assert.equal(await (await gpt.files.content(given.id)).text(), text);
    assert.equal((await gpt.files.retrieve(given.id)).bytes, text.length);
    assert.ok((await gpt.files.list()).data.some((one) => one.id === given.id));
    const asked = { input_file_id: given.id, endpoint: "/v1/completions", completion_window: "24h" };
    let batch = await gpt.batches.create(asked);
    assert.ok((await gpt.batches.list()).data.some((one) => one.id === batch.id));
    for (let i = 0; i < 600 && batch.status !== "completed"; i++) {
      await new Promise((resolve) => setTimeout(resolve, 100));
      batch = await gpt.batches.retrieve(batch.id);
    }
    const answer = JSON.parse(await (await gpt.files.content(batch.output_file_id)).text());
    assert.equal(answer.response.body.object, "text_completion");
    await assert.rejects(gpt.batches.cancel(batch.id), OpenAI.APIError);
    assert.equal((await gpt.files.delete(given.id)).deleted, true);
  },
  async messages() {
    const asked = { model, max_tokens: 2000, temperature: 0, messages: [{ role: "user", content: "What is 17 + 25?" }], thinking: { type: "enabled", budget_tokens: 1024 } };
    const whole = await claude.messages.create(asked);
    const folded = await claude.messages.stream(asked).finalMessage();
    assert.deepEqual(folded.content, whole.content);
    assert.equal(folded.stop_reason, "end_turn");
    assert.equal((await claude.messages.countTokens({ model, messages: asked.messages })).input_tokens > 5, true);
    const models = await claude.models.list();
    assert.equal(models.data[0].id, model);
  },
  async messagesAgent() {
    const tools = [{ name: "get_weather", description, input_schema: parameters }];
    const messages = [{ role: "user", content: "What is the weather in Paris?" }];
    const asked = { model, max_tokens: 300, temperature: 0, tools };
    const first = await claude.messages.stream({ ...asked, messages }).finalMessage();
    const call = first.content.find((block) => block.type === "tool_use");
    assert.deepEqual(call.input, { city: "Paris" });
    messages.push({ role: "assistant", content: first.content });
    messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: result }] });
    const last = await claude.messages.create({ ...asked, messages });
    assert.equal(last.stop_reason, "end_turn");
    assert.match(last.content[0].text, /18/);
  },
  async responses() {
    const asked = { model, temperature: 0, input: "What is 17 + 25?" };
    const whole = await gpt.responses.create(asked);
    const kinds = [];
    const stream = gpt.responses.stream(asked).on("event", (event) => kinds.push(event.type));
    const folded = await stream.finalResponse();
    assert.equal(folded.output_text, whole.output_text);
    assert.deepEqual([kinds[0], kinds.at(-1)], ["response.created", "response.completed"]);
    assert.equal((await gpt.responses.retrieve(whole.id)).output_text, whole.output_text);
    const items = await gpt.responses.inputItems.list(whole.id);
    assert.equal(items.data[0].content[0].text, asked.input);
    assert.ok((await gpt.responses.inputTokens.count({ model, input: asked.input })).input_tokens > 5);
    const background = await gpt.responses.create({ ...asked, background: true });
    const seen = [];
    for await (const event of await gpt.responses.retrieve(background.id, { stream: true })) seen.push(event.type);
    assert.equal(seen.at(-1), "response.completed");
    assert.equal((await gpt.responses.cancel(background.id)).id, background.id);
    assert.equal((await gpt.responses.compact(asked)).object, "response.compaction");
    await gpt.responses.delete(whole.id);
    await assert.rejects(gpt.responses.retrieve(whole.id), OpenAI.NotFoundError);
  },
  async responsesAgent() {
    const tools = [{ type: "function", name: "get_weather", description, parameters, strict: false }];
    const asked = { model, temperature: 0, tools };
    const first = await gpt.responses.create({ ...asked, input: "What is the weather in Paris?" });
    const call = first.output.find((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id: call.call_id, output: result };
    const last = await gpt.responses.create({ ...asked, input: [output], previous_response_id: first.id });
    assert.match(last.output_text, /18/);
  },
  async conversations() {
    const said = { type: "message", role: "user", content: "My name is Ada." };
    const talk = await gpt.conversations.create({ items: [said], metadata: { topic: "names" } });
    assert.deepEqual((await gpt.conversations.update(talk.id, { metadata: { topic: "mills" } })).metadata, { topic: "mills" });
    const asked = { model, temperature: 0, max_output_tokens: 40, input: "What is 17 + 25?" };
    const answer = await gpt.responses.create({ ...asked, conversation: talk.id });
    assert.match(answer.output_text, /42/);
    const kept = [];
    for await (const item of gpt.conversations.items.list(talk.id, { order: "asc", limit: 2 })) kept.push(item);
    assert.deepEqual(kept.map((item) => item.content[0].text), [said.content, asked.input, answer.output_text]);
    const more = await gpt.conversations.items.create(talk.id, { items: [said] });
    const where = { conversation_id: talk.id };
    assert.equal((await gpt.conversations.items.retrieve(more.data[0].id, where)).content[0].text, said.content);
    assert.equal((await gpt.conversations.items.delete(more.data[0].id, where)).id, talk.id);
    await assert.rejects(gpt.conversations.items.retrieve(more.data[0].id, where), OpenAI.NotFoundError);
    assert.equal((await gpt.conversations.delete(talk.id)).deleted, true);
    await assert.rejects(gpt.conversations.retrieve(talk.id), OpenAI.NotFoundError);
  },
  async decisions() { // through the client's own way to routes that it has no method for
    const question = { type: "choice", instructions: "Which team?", choices: [{ value: "sales" }, { value: "support" }] };
    const body = { model, input: "The order arrived broken.", questions: [question] };
    const [answer] = (await gpt.post("/decisions", { body })).answers;
    assert.ok(["sales", "support"].includes(answer.choice));
    const total = answer.probabilities.reduce((sum, one) => sum + one.probability, 0);
    assert.ok(Math.abs(total - 1) < 1e-4);
    const none = { ...body, questions: [{ ...question, choices: [] }] };
    await assert.rejects(gpt.post("/decisions", { body: none }), OpenAI.BadRequestError);
  },
  async errors() {
    const bad = { model, max_tokens: -1, messages: [] };
    await assert.rejects(claude.messages.create(bad), Anthropic.BadRequestError);
    const stranger = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), Anthropic.AuthenticationError);
    await assert.rejects(gpt.responses.create({ model: "other", input: "x" }), OpenAI.NotFoundError);
    await assert.rejects(gpt.responses.create({ model, input: "x", temperature: 9 }), OpenAI.BadRequestError);
    await assert.rejects(gpt.moderations.create({ input: "x" }), OpenAI.NotFoundError);
    await assert.rejects(claude.messages.batches.list(), Anthropic.NotFoundError);
  },
  async leaving() {
    const asked = { model, temperature: 0, max_tokens: 4000, messages: [{ role: "user", content: "Tell me a story." }], ignore_eos: true };
    const stream = claude.messages.stream(asked);
    await new Promise((resolve) => stream.on("text", resolve));
    stream.abort();
    await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok ${name}`);
}
