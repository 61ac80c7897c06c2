// A conversation with the model, streamed.

const find = (id) => document.getElementById(id);

function say(kind, text = "") {
  const element = document.createElement("div");
  element.className = kind;
  element.textContent = text;
  find("chat-log").append(element);
  return element;
}

// The objects of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// Why a request was refused; a proxy's page says nothing that could be read.
async function reasonOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `Status ${reply.status}, and not in the server's own words.`;
  }
}

export class Chat {
  constructor(headers, model) {
    this.headers = headers;
    this.model = model;
    this.clear();
    find("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    find("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    find("chat-new").addEventListener("click", () => this.clear());
  }

  clear() {
    this.running?.abort();
    this.running = null;
    this.messages = [];
    find("chat-log").replaceChildren();
  }

  async send() {
    const text = find("chat-text").value.trim();
    if (!text) return;
    find("chat-text").value = "";
    this.messages.push({ role: "user", content: text });
    say("user", text);
    const running = new AbortController();
    this.running = running;
    find("chat-send").textContent = "Stop";
    const messages = this.messages;
    try {
      messages.push({ role: "assistant", content: await this.answer(messages, running.signal) });
    } catch (error) {
      if (error.name !== "AbortError") say("note error", error.message);
      if (messages.at(-1).role === "user") messages.pop(); // it was not answered
    } finally {
      if (this.running === running) this.running = null;
      find("chat-send").textContent = "Send";
    }
  }

  async answer(messages, signal) {
    const start = performance.now();
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify(this.body(messages)),
    });
    if (!reply.ok) throw new Error(await reasonOf(reply));
    const written = { thought: null, text: null, content: "", first: null, usage: null };
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      written.usage = chunk.usage || written.usage;
      if (chunk.choices.length) this.write(chunk.choices[0].delta, written);
    }
    this.sum(written, start);
    return written.content;
  }

  body(messages) {
    const body = {
      model: this.model(),
      messages,
      stream: true,
      stream_options: { include_usage: true },
    };
    const [temperature, tokens] = [find("chat-temperature"), find("chat-tokens")];
    if (temperature.value) body.temperature = Number(temperature.value);
    if (tokens.value) body.max_tokens = Number(tokens.value);
    return body;
  }

  write(delta, written) {
    const parts = [["thought", delta.reasoning_content], ["text", delta.content]];
    for (const [name, text] of parts) {
      if (!text) continue;
      written.first ??= performance.now();
      written[name] ??= say(name === "text" ? "model" : "thought");
      written[name].textContent += text;
      if (name === "text") written.content += text;
    }
    const log = find("chat-log");
    log.scrollTop = log.scrollHeight;
  }

  sum({ usage, first }, start) {
    if (!usage || first === null) return;
    const { completion_tokens: tokens, prompt_tokens_details: details } = usage;
    const seconds = (performance.now() - first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} a second` : "";
    const cached = details?.cached_tokens ? `, ${details.cached_tokens} prompt tokens cached` : "";
    say("note", `${tokens} tokens${rate}, the first after ${Math.round(first - start)} ms${cached}`);
    const log = find("chat-log");
    log.scrollTop = log.scrollHeight;
  }
}
