// The conversation: asking, streaming, stopping, asking again. What is sent is always the whole of it.

import { events, json, request } from "./api.js";
import { announce, byId, make } from "./dom.js";
import { factsOf } from "./explain.js";
import { TurnView, noteOf } from "./messages.js";
import { sampling, systemPrompt } from "./settings.js";

const NEAR_THE_END_PX = 120;

/** The conversation as the API wants it. A document is a part of its question, before the question's own words. */
export function messagesOf(system, turns) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { parts, text, answer } of turns) {
    const documents = parts.map((part) => ({ type: "text", text: `${part.text.trimEnd()}\n\n` }));
    messages.push({ role: "user", content: parts.length ? [...documents, { type: "text", text }] : text });
    if (answer !== null) messages.push({ role: "assistant", content: answer });
  }
  return messages;
}

export class Chat {
  #turns = []; // { text, parts, answer: string or null, view }; only the last may be without an answer, while it is asked
  #running = null; // the AbortController of the answer under way
  #panel;
  #documents;

  constructor(panel, documents) {
    this.#panel = panel;
    this.#documents = documents;
  }

  get busy() {
    return this.#running !== null;
  }

  /** Called with true and false as an answer begins and ends. */
  onBusy = () => {};

  /** Ask what is in the composer. True when it was answered, in part at least, and is still part of the conversation. */
  async send() {
    const field = byId("question");
    const text = field.value.trim();
    if (this.busy || (!text && this.#documents.empty)) return false;
    const fields = sampling();
    if (fields === null) return false;
    const turn = { text, parts: this.#documents.take(), answer: null };
    turn.view = new TurnView(turn);
    field.value = "";
    byId("welcome").hidden = true;
    byId("turns").append(turn.view.node);
    this.#turns.push(turn);
    if (!(await this.#ask(turn, fields, this.#turns.length > 1))) this.#takeBack(turn);
    return this.#turns.includes(turn);
  }

  /** Ask the last question again, and keep the old answer if that fails. */
  async regenerate() {
    const turn = this.#turns.at(-1);
    const fields = sampling();
    if (this.busy || turn === undefined || fields === null) return;
    const before = { answer: turn.answer, nodes: [...turn.view.answer.childNodes] };
    turn.answer = null;
    turn.view.answer.replaceChildren();
    if (await this.#ask(turn, fields, true)) return;
    turn.answer = before.answer;
    turn.view.answer.replaceChildren(...before.nodes);
    this.#finishNote(turn, "This is the answer from before. ");
  }

  stop() {
    this.#running?.abort();
  }

  /** Forget the conversation, not what the server remembers of it. */
  clear() {
    this.stop();
    this.#turns = [];
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    this.#complain("");
  }

  /** Stream an answer into `turn`. False: nothing came, and `turn` is as it was. */
  async #ask(turn, fields, followsUp) {
    const running = (this.#running = new AbortController());
    const body = {
      ...fields,
      messages: messagesOf(systemPrompt(), this.#turns),
      stream: true,
      stream_options: { include_usage: true },
    };
    this.#begin(turn);
    let answer = "";
    let ended = null;
    let reason = null;
    let error = null;
    try {
      for await (const chunk of events(await request("v1/chat/completions", { body, signal: running.signal }))) {
        if (chunk.usage) ended = chunk;
        answer += chunk.choices[0]?.delta.content ?? "";
        reason = chunk.choices[0]?.finish_reason ?? reason;
        turn.view.showAnswer(answer);
      }
      if (ended === null) throw new Error("The connection was cut before the answer ended.");
    } catch (problem) {
      error = problem;
    }
    this.#running = null;
    turn.view.busy = false;
    this.onBusy(false);
    if (!this.#turns.includes(turn)) return true; // a new conversation began meanwhile
    if (error !== null && error.name !== "AbortError") this.#complain(wordsFor(error));
    if (ended === null && !answer) return false;
    turn.answer = answer;
    if (ended === null) this.#finishNote(turn, error.name === "AbortError" ? "Stopped. " : "Not finished. ");
    else {
      this.#finishNote(turn, noteOf(factsOf(ended), reason));
      await this.#report(turn, factsOf(ended), body.messages.slice(0, -1), followsUp);
    }
    return true;
  }

  #begin(turn) {
    for (const other of this.#turns) other.view.node.querySelector(".again")?.remove();
    this.#complain("");
    turn.view.showNote("");
    turn.view.busy = true;
    turn.view.drawn = () => this.#follow();
    this.onBusy(true);
    announce("Waiting for the answer.");
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  async #report(turn, facts, sentBefore, followsUp) {
    const known = await this.#tokensOf(sentBefore);
    const sentence = this.#panel.show(facts, followsUp, known);
    announce(`Answer: ${turn.answer} ${sentence}`);
  }

  /** How many tokens of the prompt had been part of the conversation before its last question; null when unknown. */
  async #tokensOf(messages) {
    if (messages.every(({ role }) => role === "system")) return null;
    try {
      return (await json("tokenize", { body: { messages, add_generation_prompt: false } })).count;
    } catch {
      return null; // a template that wants a question last: the line about the new part is left out
    }
  }

  #finishNote(turn, text) {
    turn.view.showNote(text, this.#againButton());
    this.#follow();
  }

  /** An unanswered question goes back to where it was written: the conversation has only what was answered. */
  #takeBack(turn) {
    this.#turns = this.#turns.filter((other) => other !== turn);
    turn.view.node.remove();
    const field = byId("question");
    field.value = [turn.text, field.value].filter(Boolean).join("\n");
    this.#documents.restore(turn.parts);
    const last = this.#turns.at(-1);
    if (last === undefined) byId("welcome").hidden = false;
    else last.view.note.append(this.#againButton());
    field.focus();
  }

  #againButton() {
    const again = make("button", { type: "button", className: "quiet again" }, "Regenerate");
    again.addEventListener("click", () => this.regenerate());
    return again;
  }

  #complain(text) {
    byId("problem").textContent = text;
  }

  /** Stay at the end of the conversation for whoever is there. */
  #follow() {
    const log = byId("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END_PX) log.scrollTop = log.scrollHeight;
  }
}

function wordsFor(error) {
  if (error instanceof TypeError) return "The server does not answer. Is it still running?";
  return error.message;
}
