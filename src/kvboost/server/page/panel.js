// The right side: what the last question cost and why, and the questions before it.

import { byId, make } from "./dom.js";
import { count, time, tokens } from "./format.js";
import { PHASES, SOURCES, history, legendItem, spansOf, stackedBar, strip } from "./charts.js";
import { explain } from "./explain.js";

export class Panel {
  #earlier = [];
  #blockSize = 16;

  set blockSize(tokensPerBlock) {
    this.#blockSize = tokensPerBlock;
    byId("block-size").textContent = count(tokensPerBlock);
  }

  /**
   * Show an answer's facts; gives the sentence about them.
   * followsUp: whether the question continues a conversation. sentBefore: tokens of the prompt that had been part of the
   * conversation already; null when unknown.
   */
  show(facts, followsUp, sentBefore) {
    const { sentence, basis } = explain(facts, this.#earlier, followsUp);
    byId("sentence").textContent = sentence;
    byId("basis").textContent = basis ?? "";
    byId("basis").hidden = basis === null;
    this.#showPrompt(facts, sentBefore);
    this.#showTime(facts);
    this.#earlier.push(facts);
    byId("history").replaceChildren(history(this.#earlier));
    byId("history-section").hidden = false;
    byId("last").hidden = false;
    return sentence;
  }

  #showPrompt(facts, sentBefore) {
    const { picture, blocksPerCell } = strip(facts.runs, this.#blockSize);
    const perSquare = blocksPerCell * this.#blockSize;
    byId("strip").replaceChildren(picture);
    const sums = new Map(Object.keys(SOURCES).map((source) => [source, 0]));
    for (const [source, size] of facts.runs) sums.set(source, (sums.get(source) ?? 0) + size);
    const shown = [...sums].filter(([source, size]) => size > 0 || source === "device" || source === "computed");
    byId("legend").replaceChildren(
      ...shown.map(([source, size]) => legendItem(source, SOURCES[source]?.label ?? source, tokens(size))),
    );
    const news = sentBefore === null ? null : facts.prompt - sentBefore;
    byId("boundary").textContent =
      `One square is ${tokens(perSquare)}.` +
      (news === null || news < 0 ? "" : ` Your new question is the last ${tokens(news)}; what stands before had been sent already.`);
    byId("runs").tBodies[0].replaceChildren(
      ...spansOf(facts.runs).map(({ source, from, to }) =>
        make("tr", {},
          make("td", {}, `${count(from + 1)} to ${count(to)}`),
          make("td", {}, SOURCES[source]?.label ?? source),
          make("td", { className: "num" }, count(to - from)),
        ),
      ),
    );
  }

  #showTime(facts) {
    const parts = Object.keys(PHASES).map((name) => [name, facts[name]]);
    byId("ttft").textContent = time(facts.ttft);
    byId("ttft-bar").replaceChildren(stackedBar(parts));
    byId("ttft-parts").replaceChildren(...parts.map(([name, ms]) => legendItem(name, PHASES[name], time(ms))));
  }
}
