import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, HELLO, MODEL, SEEN, THINKING, THOUGHT, URL_, expect, feature, run } from "./features.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: `${URL_}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ ...settings, name: "rung", supportsStructuredOutputs: true });
const MODELS = {
  "@ai-sdk/openai, chat": openai.chat(MODEL),
  "@ai-sdk/openai, responses": openai.responses(MODEL),
  "@ai-sdk/openai-compatible": compatible(MODEL),
  "@ai-sdk/anthropic": createAnthropic(settings)(MODEL),
};
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const given = { prompt: HELLO, maxRetries: 0, maxOutputTokens: 100 };

for (const [api, model] of Object.entries(MODELS)) {
  let called = 0;
  const weather = tool({ description: "Weather of a city", inputSchema: City, execute: async () => (called++, "sunny") });
  feature(api, "answer", async () => expect((await generateText({ ...given, model })).text, "no text"));
  feature(api, "stream", async () => {
    let text = "", error;
    for await (const part of streamText({ ...given, model, onError: (e) => (error = e.error) }).textStream) text += part;
    if (error) throw error;
    expect(text, "no text");
  });
  feature(api, "tools", async () => {
    called = 0;
    await generateText({
      ...given, model, tools: { weather }, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
    });
    expect(called, "not called");
  });
  feature(api, "tools, streamed", async () => {
    let deltas = 0, error;
    const stream = streamText({ ...given, model, tools: { weather }, toolChoice: "required", onError: (e) => (error = e.error) });
    for await (const part of stream.fullStream) deltas += part.type === "tool-input-delta";
    if (error) throw error;
    expect(deltas > 1, "all arguments came in one delta");
  });
  feature(api, "format", async () => {
    expect((await generateText({ ...given, model, output: Output.object({ schema: City }) })).output.city, "not parsed");
  });
  feature(api, "format and tools", async () => {
    const asked = { ...given, model, output: Output.object({ schema: City }), tools: { weather }, stopWhen: stepCountIs(2) };
    // the model may call in its first step; the second one must end it
    const second = { prepareStep: ({ stepNumber }) => (stepNumber ? { activeTools: [] } : {}) };
    expect((await generateText({ ...asked, ...second })).output.city, "not parsed");
  });
}
const thinking = { apiKey: "none", baseURL: `${THINKING}/v1` };
const thinkers = {
  "@ai-sdk/openai-compatible": createOpenAICompatible({ ...thinking, name: "rung" })(MODEL),
  "@ai-sdk/anthropic": createAnthropic(thinking)(MODEL),
};
for (const [api, model] of Object.entries(thinkers))
  feature(api, "reasoning", async () => {
    const { reasoningText, text, response } = await generateText({ ...given, model });
    expect(reasoningText === THOUGHT && text === ANSWER, `${reasoningText} | ${text}`);
    let streamed = "";
    for await (const part of streamText({ ...given, model }).fullStream) if (part.type === "reasoning-delta") streamed += part.text;
    expect(streamed === THOUGHT, streamed);
    const user = { role: "user", content: HELLO };
    const next = await generateText({ model, maxRetries: 0, messages: [user, ...response.messages, user] });
    expect(next.text === SEEN, next.text);
  });
for (const [name, model] of [["@ai-sdk/openai", openai.embedding(MODEL)], ["@ai-sdk/openai-compatible", compatible.embeddingModel(MODEL)]])
  feature("embeddings", "answer", async () => {
    const { embeddings } = await embedMany({ model, values: ["a fox", "a lantern"], maxRetries: 0 });
    expect(embeddings.length === 2, `${name}: not two vectors`);
  });
await run();
