// What the figures of an answer mean, in one sentence. Pure functions: no DOM, no state.

import { count, time } from "./format.js";

/** Fewer computed tokens than this measure the fixed cost of a step rather than the cost of reading. */
export const FEWEST_TOKENS_TO_MEASURE = 64;

/** An estimate below this multiple of what was measured is within the noise, and not worth claiming. */
const CLEARLY_SLOWER = 1.2;

/**
 * Facts of one answer from its usage chunk.
 * Gives { prompt, cached, computed, bySource, ttft, queue, lookup, load, compute, runs, written, perSecond }; times in ms.
 */
export function factsOf({ usage, kvboost }) {
  const written = usage.completion_tokens;
  const writing = kvboost.total_ms - kvboost.ttft_ms;
  return {
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details.cached_tokens,
    computed: usage.kvboost.computed,
    bySource: usage.kvboost.cached,
    ttft: kvboost.ttft_ms,
    queue: kvboost.queue_ms,
    lookup: kvboost.lookup_ms,
    load: kvboost.load_ms,
    compute: kvboost.compute_ms,
    runs: kvboost.blocks,
    written,
    perSecond: written > 1 && writing > 0 ? ((written - 1) * 1000) / writing : null,
  };
}

/** The smallest ms per computed token among earlier answers that computed enough to measure it; null without one. */
export function msPerToken(earlier) {
  const rates = earlier.filter((f) => f.computed >= FEWEST_TOKENS_TO_MEASURE).map((f) => f.compute / f.computed);
  return rates.length ? Math.min(...rates) : null;
}

/**
 * { sentence, basis }: why the first word came when it did, and what an estimate in it rests on (null without one).
 * earlier: the facts of earlier answers. followsUp: whether this question continues a conversation.
 */
export function explain(facts, earlier, followsUp) {
  const { prompt, cached, ttft, queue, lookup } = facts;
  const waited = queue > 250 && queue > ttft / 2 ? ` Of that, ${time(queue)} went by before its turn came.` : "";
  if (cached === 0) {
    const opening = earlier.length
      ? `Nothing of these ${count(prompt)} prompt tokens was known yet, so all of them were read`
      : `All ${count(prompt)} prompt tokens were read for the first time`;
    const next = earlier.length ? "" : " They are remembered now: ask something more, and only the new part is read.";
    return { sentence: `${opening}, and the first word came after ${time(ttft)}.${waited}${next}`, basis: null };
  }
  const from = followsUp ? "your last question" : "an earlier request";
  const opening = `${count(cached)} of ${count(prompt)} prompt tokens were remembered from ${from}`;
  const perToken = msPerToken(earlier);
  const without = perToken === null ? 0 : queue + lookup + prompt * perToken;
  if (without < ttft * CLEARLY_SLOWER) {
    return { sentence: `${opening}; the first word came after ${time(ttft)}.${waited}`, basis: null };
  }
  return {
    sentence: `${opening}, so the first word came after ${time(ttft)} instead of about ${time(without)}.${waited}`,
    basis: `“About”: reading took at least ${time(perToken)} per token in the questions before.`,
  };
}
