// The SDKs for Node: `node sdks.mjs URL MODEL`. The last line says what was asked and answered.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Hello there" }];
let requests = 0, output_tokens = 0;
const count = (tokens) => {
  if (!(tokens > 0)) throw new Error(`usage is missing: ${tokens}`);
  requests += 1;
  output_tokens += tokens;
};

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
count((await openai.chat.completions.create({ model, messages, max_tokens: 5 })).usage.completion_tokens);
let usageTokens;
const options = { include_usage: true };
for await (const chunk of await openai.chat.completions.create({ model, messages, max_tokens: 6, stream: true, stream_options: options })) {
  usageTokens = chunk.usage?.completion_tokens ?? usageTokens;
}
count(usageTokens);
count((await openai.responses.create({ model, input: "Hello", max_output_tokens: 5 })).usage.output_tokens);

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const listed = await anthropic.models.list();
if (listed.data[0].display_name !== model || listed.has_more) throw new Error(JSON.stringify(listed.data[0]));
count((await anthropic.messages.create({ model, messages, max_tokens: 5 })).usage.output_tokens);
count((await anthropic.messages.stream({ model, messages, max_tokens: 6 }).finalMessage()).usage.output_tokens);

const compatible = createOpenAICompatible({ name: "own", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const models = [
  compatible(model),
  createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses(model),
  createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model),
];
for (const one of models) {
  const asked = { model: one, prompt: "Hello", maxOutputTokens: 5, maxRetries: 0 };
  count((await generateText(asked)).usage.outputTokens);
  const stream = streamText(asked);
  for await (const _ of stream.textStream);
  count((await stream.usage).outputTokens);
}
console.log(JSON.stringify({ requests, output_tokens }));
