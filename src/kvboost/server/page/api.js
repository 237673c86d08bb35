// Talks to the server this page came from: JSON, server-sent events, and the API key, which only this module holds.

let key = null;
let askForKey = null;
let asking = null;
const waiting = [];

/** What the server refused, in its own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** `ask(wasWrong)` resolves to a key, or to null when the user gives none. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** Resolves when a key is given next. */
export function nextKey() {
  return new Promise((resolve) => waiting.push(resolve));
}

/** A response with status 2xx. Asks for a key when one is needed. Throws `ApiError`, or what fetch throws. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const sent = key;
    const headers = {};
    if (sent !== null) headers.Authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
    if (response.ok) return response;
    if (response.status !== 401 || askForKey === null) throw await refusal(response);
    if (key === sent) {
      asking ??= askForSendableKey(sent !== null).finally(() => (asking = null)); // one question, however many requests wait
      const given = await asking;
      if (given === null) throw await refusal(response);
      key = given;
      waiting.splice(0).forEach((resolve) => resolve());
    }
  }
}

async function askForSendableKey(wasWrong) {
  let given = await askForKey(wasWrong);
  while (given !== null && !/^[\x21-\x7e]+$/.test(given)) given = await askForKey(true); // no header can hold it
  return given;
}

export async function json(path, options) {
  return (await request(path, options)).json();
}

async function refusal(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not the server's own body: a proxy's, perhaps
  }
  return new ApiError(response.status, message);
}

/** The JSON of each server-sent event of a response, until it ends or says [DONE]. Throws `ApiError` for error events. */
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue; // a comment keeps the connection open
        const data = block.slice(6);
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new ApiError(told.error.code === "request_timeout" ? 504 : 500, told.error.message);
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
