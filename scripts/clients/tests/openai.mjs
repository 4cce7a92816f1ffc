// The openai package of npm: a chat, a stream, a forced call, a schema and a response.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.JPAGED_URL, apiKey: "none" });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { model: "demo", messages, temperature: 0, max_completion_tokens: 64, store: true };
const city = z.object({ name: z.enum(["Paris", "Rome"]) });

const whole = (await client.chat.completions.create(options)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, whole);

const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions.create({ ...options, tools, tool_choice: "required" });
assert.equal(called.choices[0].message.tool_calls[0].function.name, "weather");

const parsed = await client.chat.completions.parse({ ...options, response_format: zodResponseFormat(city, "city") });
assert.ok(["Paris", "Rome"].includes(parsed.choices[0].message.parsed.name));

const response = await client.responses.create({ model: "demo", input: messages, max_output_tokens: 16 });
assert.ok(response.output_text);
