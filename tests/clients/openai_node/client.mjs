import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { HELLO, MODEL, URL_, expect, feature, run } from "./features.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: HELLO }];
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const parameters = {
  type: "object", properties: { city: { type: "string", enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false,
};
const named = { name: "weather", description: "Weather of a city", parameters, strict: true };
const tool = { type: "function", function: named };
const flatTool = { type: "function", ...named };
const model = MODEL;

feature("completions", "answer", async () => {
  const answer = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 8 });
  expect(answer.choices[0].text, "no text");
});
feature("completions", "stream", async () => {
  let text = "";
  for await (const chunk of await client.completions.create({ model, prompt: "Once", max_tokens: 8, stream: true }))
    text += chunk.choices[0].text;
  expect(text, "no text");
});
feature("chat", "answer", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
  expect(answer.choices[0].message.content, "no content");
});
feature("chat", "stream", async () => {
  const answer = await client.chat.completions.stream({ model, messages, max_tokens: 100 }).finalChatCompletion();
  expect(answer.choices[0].message.content, "no content");
});
feature("chat", "tools", async () => {
  const answer = await client.chat.completions.create({ model, messages, tools: [tool], tool_choice: "required" });
  const message = answer.choices[0].message, call = message.tool_calls[0];
  City.parse(JSON.parse(call.function.arguments));
  const told = [...messages, message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
  await client.chat.completions.create({ model, messages: told, tools: [tool], max_tokens: 20 });
});
feature("chat", "tools, streamed", async () => {
  let deltas = 0;
  const stream = client.chat.completions.stream({ model, messages, tools: [tool], tool_choice: "required" });
  stream.on("tool_calls.function.arguments.delta", () => deltas++);
  City.parse(JSON.parse((await stream.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments));
  expect(deltas > 1, "all arguments came in one delta");
});
feature("chat", "format", async () => {
  const answer = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(City, "city") });
  expect(answer.choices[0].message.parsed.city, "not parsed");
});
feature("chat", "format and tools", async () => {
  const body = { model, messages, response_format: zodResponseFormat(City, "city"), tools: [tool] };
  const { message } = (await client.chat.completions.parse(body)).choices[0];
  expect(message.parsed || message.tool_calls?.length, "neither a call nor the format");
});
feature("responses", "answer", async () => {
  expect((await client.responses.create({ model, input: HELLO, max_output_tokens: 100 })).output_text, "no text");
});
feature("responses", "stream", async () => {
  const answer = await client.responses.stream({ model, input: messages, max_output_tokens: 100 }).finalResponse();
  expect(answer.output_text, "no text");
});
feature("responses", "tools", async () => {
  const answer = await client.responses.create({ model, input: HELLO, tools: [flatTool], tool_choice: "required" });
  const call = answer.output.find((item) => item.type === "function_call");
  City.parse(JSON.parse(call.arguments));
  const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
  await client.responses.create({ model, input: [...messages, ...answer.output, output], tools: [flatTool], max_output_tokens: 20 });
});
feature("responses", "tools, streamed", async () => {
  let deltas = 0;
  const stream = client.responses.stream({ model, input: HELLO, tools: [flatTool], tool_choice: "required" });
  stream.on("response.function_call_arguments.delta", () => deltas++);
  await stream.finalResponse();
  expect(deltas > 1, "all arguments came in one delta");
});
feature("responses", "format", async () => {
  const answer = await client.responses.parse({ model, input: HELLO, text: { format: zodTextFormat(City, "city") } });
  expect(answer.output_parsed.city, "not parsed");
});
feature("responses", "format and tools", async () => {
  const body = { model, input: HELLO, text: { format: zodTextFormat(City, "city") }, tools: [flatTool] };
  const answer = await client.responses.parse(body);
  expect(answer.output_parsed || answer.output.at(-1).type === "function_call", "neither a call nor the format");
});
feature("responses", "state", async () => {
  const first = await client.responses.create({ model, input: HELLO, max_output_tokens: 20 });
  await client.responses.create({ model, input: "And 5 more?", previous_response_id: first.id, max_output_tokens: 20 });
  expect((await client.responses.retrieve(first.id)).output_text === first.output_text, "another text");
});
feature("embeddings", "answer", async () => {
  expect((await client.embeddings.create({ model, input: ["a fox", "a lantern"] })).data.length === 2, "not two vectors");
});
await run();
