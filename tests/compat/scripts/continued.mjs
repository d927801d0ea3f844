// OpenAI's SDK for Node and the AI SDK, while streams break: `node continued.mjs URL MODEL`. Answers in one piece do not
// break, so they are the texts that streams must have.
import OpenAI from "openai";
import { streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";

const [url, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const streamed = { model, stream: true, stream_options: { include_usage: true } };
const makers = [
  createOpenAICompatible({ name: "own", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true }),
  createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat,
];
let requests = 0, output_tokens = 0;
const check = (wanted, text, tokens) => {
  if (text !== wanted.text) throw new Error(`${text} is not ${wanted.text}`);
  if (tokens !== wanted.tokens) throw new Error(`usage is ${tokens}, not ${wanted.tokens}`);
  requests += 1;
  output_tokens += tokens;
};
const read = async (stream, wanted, textOf) => {
  let text = "", usage, roles = 0;
  for await (const chunk of stream) {
    text += textOf(chunk.choices[0]) ?? "";
    roles += chunk.choices[0]?.delta?.role ? 1 : 0;
    usage = chunk.usage ?? usage;
  }
  check(wanted, text, usage.completion_tokens);
  return roles;
};

for (let number = 0; number < 2; number++) {
  const prompt = `Count from number ${number} on`;
  const messages = [{ role: "user", content: prompt }];
  const answer = await openai.chat.completions.create({ model, messages });
  const wanted = { text: answer.choices[0].message.content, tokens: answer.usage.completion_tokens };
  check(wanted, wanted.text, wanted.tokens);
  const roles = await read(await openai.chat.completions.create({ ...streamed, messages }), wanted, (c) => c?.delta.content);
  if (roles !== 1) throw new Error(`${roles} roles`);
  const final = await openai.chat.completions.stream({ ...streamed, messages }).finalChatCompletion();
  check(wanted, final.choices[0].message.content, final.usage.completion_tokens);
  for (const make of makers) {
    const result = streamText({ model: make(model), prompt, maxRetries: 0 });
    check(wanted, await result.text, (await result.usage).outputTokens);
  }
  const completion = await openai.completions.create({ model, prompt });
  const whole = { text: completion.choices[0].text, tokens: completion.usage.completion_tokens };
  check(whole, whole.text, whole.tokens);
  await read(await openai.completions.create({ ...streamed, prompt }), whole, (c) => c?.text);
}
console.log(JSON.stringify({ requests, output_tokens }));
