// The ai package of npm (Vercel's), with its provider for servers of this API: a text, a stream, a call and an object.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "jpaged", baseURL: process.env.JPAGED_URL, includeUsage: true, supportsStructuredOutputs: true,
});
const options = { model: provider("demo"), prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 64 };
const city = z.object({ name: z.enum(["Paris", "Rome"]) });

const whole = await generateText(options);
assert.ok(whole.text && whole.usage.outputTokens > 0);
let streamed = "";
for await (const piece of streamText(options).textStream) streamed += piece;
assert.equal(streamed, whole.text);

const weather = tool({ description: "tells the weather", inputSchema: city, execute: async ({ name }) => `sunny in ${name}` });
const called = await generateText({ ...options, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } });
assert.equal(called.toolResults[0].toolName, "weather");

const made = await generateText({ ...options, output: Output.object({ schema: city }) });
assert.ok(["Paris", "Rome"].includes(made.output.name));
