// The @anthropic-ai/sdk package of npm: a message, a stream, a forced call with its result, a count of tokens, and the models.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.JPAGED_URL.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { model: "demo", messages, max_tokens: 32, top_k: 1 };

const whole = await client.messages.create(options);
const stream = client.messages.stream(options);
let streamed = "";
stream.on("text", (piece) => (streamed += piece));
const final = await stream.finalMessage();
assert.equal(streamed, whole.content[0].text);
assert.equal(final.stop_reason, whole.stop_reason);
assert.equal(final.usage.output_tokens, whole.usage.output_tokens);

const input_schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ name: "weather", description: "tells the weather", input_schema }];
const tool_choice = { type: "tool", name: "weather", disable_parallel_tool_use: true };
const called = await client.messages.create({ ...options, max_tokens: 64, tools, tool_choice });
const use = called.content.find((block) => block.type === "tool_use");
assert.equal(called.stop_reason, "tool_use");
assert.ok(["Paris", "Rome"].includes(use.input.city));

const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "sunny" }] };
const after = [...messages, { role: "assistant", content: called.content }, result];
const told = await client.messages.create({ ...options, messages: after, tools, tool_choice: { type: "none" } });
assert.ok(told.content.every((block) => block.type === "text"));

const counted = await client.messages.countTokens({ model: "demo", messages });
assert.equal(counted.input_tokens, whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0));
const listed = [];
for await (const model of client.models.list()) listed.push(model.id);
assert.deepEqual(listed, ["demo"]);
await assert.rejects(client.messages.create({ ...options, model: "nothing" }), Anthropic.NotFoundError);
