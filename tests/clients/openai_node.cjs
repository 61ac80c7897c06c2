// OpenAI's client for Node: node openai_node.cjs URL (of a model that talks) URL (of one for vectors)
"use strict";
const assert = require("node:assert");
const OpenAI = require("openai");

const [textUrl, vectorsUrl] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${textUrl}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      parameters: { type: "object", properties: { city: { type: "string" } } },
    },
  },
];

async function metric(name) {
  const text = await (await fetch(`${textUrl}/metrics`)).text();
  const line = text.split("\n").find((each) => each.startsWith(`${name}{`));
  return Number(line.split(" ").at(-1));
}

async function chat() {
  const reply = await client.chat.completions.create({ model: "tiny", messages, logprobs: true });
  assert.equal(reply.choices[0].message.content, "Hello!");
  assert.equal(reply.choices[0].logprobs.content.length, 6);
  assert.equal(reply.usage.completion_tokens, 6);
  assert.ok(reply._request_id);
  const models = await client.models.list();
  assert.equal(models.data[0].id, "tiny");
}

async function streams() {
  const body = { model: "tiny", messages, stream: true, stream_options: { include_usage: true } };
  const chunks = [];
  for await (const chunk of await client.chat.completions.create(body)) chunks.push(chunk);
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, "Hello!");
  assert.equal(chunks.at(-1).usage.completion_tokens, 6);
  const runner = client.chat.completions.stream({ model: "tiny", messages });
  assert.equal(await runner.finalContent(), "Hello!");
  const prompt = { model: "tiny", prompt: "a", stream: true };
  let continued = "";
  for await (const chunk of await client.completions.create(prompt)) continued += chunk.choices[0].text;
  assert.equal(continued, "Hello!");
}

async function calls() {
  const reply = await client.chat.completions.create({ model: "tiny", messages, tools });
  assert.equal(reply.choices[0].finish_reason, "tool_calls");
  const [call] = reply.choices[0].message.tool_calls;
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo" });
  const result = { role: "tool", tool_call_id: call.id, content: "cold" };
  const last = await client.chat.completions.create({
    model: "tiny",
    messages: [...messages, reply.choices[0].message, result],
    tools,
  });
  assert.equal(last.choices[0].message.content, "It is cold.");
  const asked = [];
  const weather = (args) => (asked.push(args.city), "cold");
  const runner = client.chat.completions.runTools({
    model: "tiny",
    messages,
    stream: true,
    tools: [{ type: "function", function: { ...tools[0].function, function: weather, parse: JSON.parse } }],
  });
  assert.equal(await runner.finalContent(), "It is cold.");
  assert.deepEqual(asked, ["Oslo"]);
}

async function structured() {
  const schema = {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" } },
    required: ["name", "age"],
    additionalProperties: false,
  };
  const reply = await client.chat.completions.create({
    model: "tiny",
    messages,
    response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  });
  assert.deepEqual(JSON.parse(reply.choices[0].message.content), { name: "Ada", age: 36 });
}

async function embeddings() {
  const vectors = new OpenAI({ baseURL: `${vectorsUrl}/v1`, apiKey: "any", maxRetries: 0 });
  const plain = await vectors.embeddings.create({
    model: "tiny",
    input: ["a", "b"],
    encoding_format: "float",
  });
  const packed = await vectors.embeddings.create({ model: "tiny", input: ["a", "b"] });
  assert.equal(packed.data.length, 2);
  packed.data.forEach((each, at) =>
    each.embedding.forEach((value, i) =>
      assert.ok(Math.abs(value - plain.data[at].embedding[i]) < 1e-6),
    ),
  );
}

async function aborted() {
  const slow = { model: "tiny", messages: [{ role: "user", content: "slowly" }], stream: true };
  const stream = await client.chat.completions.create(slow);
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  const controller = new AbortController();
  const { signal } = controller;
  const waiting = client.chat.completions.create({ ...slow, stream: false }, { signal });
  setTimeout(() => controller.abort(), 200);
  await assert.rejects(waiting, OpenAI.APIUserAbortError);
  for (let i = 0; (await metric("vllm:num_requests_running")) > 0; i++) {
    assert.ok(i < 50, "requests still run");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

async function errors() {
  const ask = (more) => client.chat.completions.create({ model: "tiny", messages, ...more });
  await assert.rejects(ask({ temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(ask({ model: "nothing" }), OpenAI.NotFoundError);
}

(async () => {
  for (const part of [chat, streams, calls, structured, embeddings, aborted, errors]) await part();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
