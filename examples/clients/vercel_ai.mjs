// One row of the matrix by the Vercel AI SDK: node vercel_ai.mjs ROW. The server and what is asked come as JSON in ASKED.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { z } from "zod";

const asked = JSON.parse(process.env.ASKED);
const provider = createOpenAICompatible({
  name: "paceline",
  baseURL: asked.url,
  apiKey: asked.api_key,
  supportsStructuredOutputs: true,
});
const settings = { model: provider(asked.model), temperature: 0, maxRetries: 0 };

const rows = {
  async plain() {
    return (await generateText({ ...settings, prompt: asked.question, maxOutputTokens: asked.max_tokens })).text;
  },
  async streamed() {
    const answer = streamText({ ...settings, prompt: asked.question, maxOutputTokens: asked.max_tokens });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    return text;
  },
  async tools() {
    const weather = tool({ description: asked.tool_description, inputSchema: jsonSchema(asked.tool_schema) });
    const answer = await generateText({
      ...settings,
      prompt: asked.tool_question,
      tools: { [asked.tool]: weather },
      toolChoice: "required",
      maxOutputTokens: asked.call_tokens,
    });
    const [call] = answer.toolCalls;
    return { name: call.toolName, arguments: call.input };
  },
  async structured() {
    const schema = z.object({ name: z.string().max(20), country: z.string().max(20) });
    const output = Output.object({ schema });
    return (await generateText({ ...settings, prompt: asked.city_question, output, maxOutputTokens: asked.call_tokens })).output;
  },
};

console.log(JSON.stringify(await rows[process.argv[2]]()));
