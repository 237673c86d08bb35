// System prompt and sampling. A field that is left empty is not sent: the model's own default holds.

import { byId } from "./dom.js";

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens", seed: "seed" };

export const systemPrompt = () => byId("system").value.trim();

/** The sampling fields of a request; null when one is out of range, after pointing at it. */
export function sampling() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const input = byId(id);
    if (!input.checkValidity()) {
      byId("settings").open = true;
      input.reportValidity();
      return null;
    }
    if (input.value !== "") fields[name] = input.valueAsNumber;
  }
  return fields;
}
