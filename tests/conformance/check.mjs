// What the official JavaScript client must be able to do: `node check.mjs URL MODEL`.
// `check.py` does the same with the official Python client.

import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "hello" }];
const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] }, sure: { type: "boolean" } },
  required: ["colour", "sure"],
  additionalProperties: false,
};
const tool = {
  type: "function",
  function: { name: "paint", description: "Paint it", parameters: schema },
};

async function models() {
  const found = [];
  for await (const each of client.models.list()) found.push(each.id);
  assert.deepEqual(found, [model]);
  assert.equal((await client.models.retrieve(model)).object, "model");
}

async function chat() {
  const answer = await client.chat.completions.create({
    model, messages, max_completion_tokens: 5, n: 2, seed: 1, temperature: 1,
  });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  assert.equal(answer.usage.completion_tokens, 10);
  assert.equal(typeof answer.usage.prompt_tokens_details.cached_tokens, "number");
}

async function stream() {
  const options = { model, messages, max_tokens: 5, temperature: 0 };
  const whole = (await client.chat.completions.create(options)).choices[0].message.content;
  const chunks = [];
  const events = await client.chat.completions.create({
    ...options, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of events) chunks.push(chunk);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.map((each) => each.choices[0]?.delta.content ?? "").join(""), whole);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 5);
}

async function logprobs() {
  const answer = await client.chat.completions.create({
    model, messages, max_tokens: 3, logprobs: true, top_logprobs: 2, temperature: 0,
  });
  const { content } = answer.choices[0].logprobs;
  assert.equal(content.length, 3);
  for (const each of content) assert.equal(each.top_logprobs.length, 2);
}

async function completions() {
  const answer = await client.completions.create({
    model, prompt: ["a", "b"], max_tokens: 2, logprobs: 1,
  });
  assert.equal(answer.choices.length, 2);
}

async function structured() {
  const answer = await client.chat.completions.create({
    model, messages, max_tokens: 100,
    response_format: { type: "json_schema", json_schema: { name: "paint", schema } },
  });
  const value = JSON.parse(answer.choices[0].message.content);
  assert.ok(["red", "green"].includes(value.colour));
  assert.equal(typeof value.sure, "boolean");
}

async function tools() {
  const options = {
    model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
    max_tokens: 200,
  };
  const [choice] = (await client.chat.completions.create(options)).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, "paint");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["colour", "sure"]);
  const result = { role: "tool", tool_call_id: call.id, content: "done" };
  await client.chat.completions.create({
    model, messages: [...messages, choice.message, result], tools: [tool], max_tokens: 3,
  });
  const runner = client.chat.completions.stream(options);
  const [streamed] = (await runner.finalChatCompletion()).choices;
  const { function: called } = streamed.message.tool_calls[0];
  assert.deepEqual(Object.keys(JSON.parse(called.arguments)).sort(), ["colour", "sure"]);
}

async function errors() {
  const wrong = [
    [{ temperature: 9 }, OpenAI.BadRequestError, "temperature"],
    [{ colour: "red" }, OpenAI.BadRequestError, "colour"],
    [{ model: "nobody" }, OpenAI.NotFoundError, "model"],
  ];
  for (const [fields, kind, param] of wrong) {
    await assert.rejects(
      client.chat.completions.create({ model, messages, ...fields }),
      (error) => error instanceof kind && error.param === param && Boolean(error.requestID),
    );
  }
}

async function batches() {
  const body = { model, messages, max_tokens: 2 };
  const lines = [0, 1, 2, 3].map((n) => JSON.stringify({
    custom_id: `j${n}`, method: "POST", url: "/v1/chat/completions", body,
  }));
  const file = await client.files.create({
    file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch",
  });
  let batch = await client.batches.create({
    input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
  });
  for (let tries = 0; tries < 1200 && !["completed", "failed"].includes(batch.status); tries++) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  const text = await (await client.files.content(batch.output_file_id)).text();
  const names = text.trim().split("\n").map((line) => JSON.parse(line).custom_id);
  assert.deepEqual(names.sort(), ["j0", "j1", "j2", "j3"]);
  assert.ok((await client.files.delete(file.id)).deleted);
}

for (const check of [
  models, chat, stream, logprobs, completions, structured, tools, errors, batches,
]) {
  await check();
  console.log("ok", check.name);
}
