// How turns look. Everything a user or a model wrote is set as text, so it can never become markup.

import { make } from "./dom.js";
import { count, percent, rate, time, tokens } from "./format.js";

const FENCE = /^```([^\n`]*)\n([\s\S]*?)(?:^```[^\S\n]*$|(?![\s\S]))/gm;

/** Nodes for a text: code between fences of three backticks in a box of its own, also while its end is to come. */
export function textNodes(text) {
  const nodes = [];
  let at = 0;
  const plain = (piece) => {
    if (piece.trim()) nodes.push(make("p", { className: "text" }, piece.trim()));
  };
  for (const match of text.matchAll(FENCE)) {
    plain(text.slice(at, match.index));
    const language = match[1].trim();
    const label = language ? `Code, ${language}` : "Code";
    nodes.push(make("pre", { tabIndex: 0, role: "region", "aria-label": label }, make("code", {}, match[2].replace(/\n$/, ""))));
    at = match.index + match[0].length;
  }
  plain(text.slice(at));
  return nodes;
}

/** A document as a block that opens and closes. */
export function documentBlock({ name, text }) {
  const summary = make("summary", {}, make("b", {}, name), ` ${count(text.length)} characters`);
  const body = make("pre", { tabIndex: 0, role: "region", "aria-label": name }, text);
  return make("details", { className: "document" }, summary, body);
}

/** A question and its answer in the conversation. */
export class TurnView {
  constructor(turn) {
    this.answer = make("div", { className: "answer-text" });
    this.note = make("p", { className: "note muted small" });
    const question = make("article", { className: "question", "aria-label": "You" },
      make("h3", {}, "You"), ...turn.parts.map(documentBlock), ...textNodes(turn.text));
    this.reply = make("article", { className: "answer", "aria-label": "Answer" },
      make("h3", {}, "Answer"), this.answer, this.note);
    this.node = make("li", {}, question, this.reply);
  }

  /** Show what is there of the answer; drawn once per frame, however many tokens came. */
  showAnswer(text) {
    this.latest = text;
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = null;
    this.answer.replaceChildren(...textNodes(this.latest));
    this.drawn?.();
  }

  set busy(value) {
    this.reply.classList.toggle("busy", value);
    this.reply.setAttribute("aria-busy", String(value));
  }

  /** A line below the answer, and buttons after it. */
  showNote(text, ...buttons) {
    this.note.replaceChildren(text, ...buttons);
  }
}

/** The line below a finished answer. reason: the API's finish_reason. */
export function noteOf(facts, reason) {
  const pace = facts.perSecond === null ? "" : `, ${rate(facts.perSecond)} tokens per second`;
  return `First word after ${time(facts.ttft)}; ${percent(facts.cached / facts.prompt)} of the prompt remembered; `
    + `${tokens(facts.written)} written${pace}. ${reason === "length" ? "Cut off at the limit of tokens. " : ""}`;
}
