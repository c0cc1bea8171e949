// Requests to the scheduler. The token stays in this tab's session and is sent in a header only.

const KEY = "pipollux-token";
const PATIENCE_MS = 20_000;
const SILENCE_MS = 45_000; // an idle stream sends a comment every 15 s

export const token = {
  get: () => sessionStorage.getItem(KEY),
  keep: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The scheduler refused; the message is its sentence. */
export class Refusal extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/** The scheduler does not answer. */
export class Away extends Error {}

/** Send a request; return the answer. */
export async function ask(path, { method = "GET", body } = {}) {
  const response = await send(path, { method, body, signal: AbortSignal.timeout(PATIENCE_MS) });
  try {
    return await response.json();
  } catch (error) {
    throw new Away(error.message);
  }
}

/** Send a request; null without an answer, which the bar shows. */
export async function quietly(path) {
  try {
    return await ask(path);
  } catch (error) {
    if (error instanceof Away || error instanceof Refusal) return null;
    throw error;
  }
}

/** Yield event summaries from the event after `last`, until the stream ends. */
export async function* listen(last, signal, onOpen) {
  const headers = { "Last-Event-ID": String(last) };
  const response = await within(send("/events/stream?summary=true", { headers, signal }), PATIENCE_MS);
  onOpen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), SILENCE_MS);
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((one) => one.startsWith("data: "));
        if (line) yield JSON.parse(line.slice(6));
      }
    }
  } catch (error) {
    throw new Away(error.message);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function within(promise, milliseconds) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Away("timeout")), milliseconds);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

async function send(path, { method = "GET", body, headers = {}, signal }) {
  let response;
  try {
    response = await fetch(path, {
      method,
      body: body && JSON.stringify(body),
      headers: { ...headers, Authorization: `Bearer ${token.get()}` },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal,
    });
  } catch (error) {
    throw new Away(error.message);
  }
  if (response.ok) return response;
  throw new Refusal(response.status, await sentence(response));
}

async function sentence(response) {
  try {
    return String((await response.json()).detail);
  } catch {
    return `the scheduler answered with status ${response.status}`;
  }
}
