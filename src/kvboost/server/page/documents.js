// Documents on their way into the next question: pasted, typed or read from files. Each stays a part of its own.

import { announce, byId, make } from "./dom.js";
import { count } from "./format.js";
import { documentBlock } from "./messages.js";

/** A pasted text of this many characters or more is a document: it would hide the question in the field. */
const LONG_PASTE = 1500;

export class Documents {
  #parts = [];
  #numbered = 0;

  constructor(question) {
    question.addEventListener("paste", (event) => {
      const text = event.clipboardData.getData("text/plain");
      if (text.length < LONG_PASTE) return;
      event.preventDefault();
      this.add(text);
    });
    const dialog = byId("document-dialog");
    byId("add-document").addEventListener("click", () => {
      dialog.returnValue = "";
      dialog.showModal();
    });
    dialog.addEventListener("close", async () => {
      const files = [...byId("document-file").files];
      const text = byId("document-text").value;
      byId("document-file").value = "";
      byId("document-text").value = "";
      if (dialog.returnValue !== "add") return;
      if (text.trim()) this.add(text);
      for (const file of files) this.add(await file.text(), file.name);
      question.focus();
    });
  }

  add(text, name = `Document ${++this.#numbered}`) {
    this.#parts.push({ name, text });
    this.#show();
    announce(`${name} added, ${count(text.length)} characters.`);
  }

  /** The parts gathered so far; afterwards there are none. */
  take() {
    const parts = this.#parts;
    this.#parts = [];
    this.#numbered = 0;
    this.#show();
    return parts;
  }

  /** Put parts back that could not be sent, before those added since. */
  restore(parts) {
    this.#parts = [...parts, ...this.#parts];
    this.#numbered += parts.length;
    this.#show();
  }

  get empty() {
    return this.#parts.length === 0;
  }

  #show() {
    byId("parts").replaceChildren(
      ...this.#parts.map((part) => {
        const remove = make("button", { type: "button", className: "quiet", "aria-label": `Remove ${part.name}` }, "Remove");
        remove.addEventListener("click", () => {
          this.#parts = this.#parts.filter((other) => other !== part);
          this.#show();
          byId("question").focus();
        });
        return make("div", { className: "pending" }, documentBlock(part), remove);
      }),
    );
  }
}
