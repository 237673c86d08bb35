// The server's pulse: /v1/events, once a second while something changes.

import { events, nextKey, request } from "./api.js";
import { byId, make } from "./dom.js";
import { bytes, count, percent, rate } from "./format.js";

const TIER_NAMES = { device: "Device", host: "Main memory", disk: "Disk", remote: "Another machine" };

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 30_000;

/** Follow the server for as long as the page is open; when the connection ends, try again ever more slowly. */
export async function follow() {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const response = await request("v1/events");
      say("Live.");
      for await (const pulse of events(response)) {
        pause = FIRST_PAUSE_MS;
        show(pulse);
      }
      say("The server ended the connection. Trying again.");
    } catch (error) {
      say(error.status === undefined ? "The server does not answer. Trying again." : error.message);
      if (error.status === 401) {
        await nextKey(); // none was given: it is asked for again with the next question, not by us
        continue;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

function say(text) {
  if (byId("connection").textContent !== text) byId("connection").textContent = text;
}

function show(pulse) {
  byId("running").textContent = count(pulse.running);
  byId("waiting").textContent = count(pulse.waiting);
  byId("written").textContent = rate(pulse.tokens_per_second);
  byId("read").textContent = rate(pulse.computed_tokens_per_second);
  byId("hit-rate").textContent =
    `${count(pulse.prefix_hits_tokens)} of ${count(pulse.prefix_queries_tokens)} prompt tokens (${percent(pulse.hit_rate)})`;
  byId("tiers").replaceChildren(...pulse.tiers.map(tier));
}

/** A memory: how much of it holds something that can be found again, and how much is in use. */
function tier(facts) {
  const name = TIER_NAMES[facts.name] ?? facts.name;
  const rows = [bar(`${name}: remembered`, facts.blocks_cached, facts.blocks_total, "known")];
  if (facts.blocks_referenced !== undefined) {
    rows.push(bar(`${name}: in use by running answers`, facts.blocks_referenced, facts.blocks_total, "wait"));
  }
  const notes = [];
  if (facts.bytes_total) notes.push(`${bytes(facts.bytes_cached ?? 0)} of ${bytes(facts.bytes_total)} remembered`);
  if (facts.blocks_pinned) notes.push(`${count(facts.blocks_pinned)} blocks pinned`);
  return make("div", { className: "tier" }, ...rows, make("p", { className: "muted small" }, `${notes.join(", ")}`));
}

function bar(label, value, total, kind) {
  const share = total ? value / total : 0;
  const fill = make("span", { className: `fill ${kind}` });
  fill.style.inlineSize = value ? `max(2px, ${share * 100}%)` : "0";
  const meter = make("div", {
    className: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": String(total),
    "aria-valuenow": String(value), "aria-valuetext": `${count(value)} of ${count(total)} blocks`,
  }, fill);
  return make("div", { className: "bar" },
    make("span", {}, label), make("b", {}, `${count(value)} / ${count(total)} blocks`), meter);
}
