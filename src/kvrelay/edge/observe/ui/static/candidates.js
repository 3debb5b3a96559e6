// Who was compared, with the arithmetic of each: in a receipt and in an answer to "what if".

import {bar, h} from "./dom.js";
import {count} from "./format.js";

const number = (value) => Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(4)).toLocaleString("en");

/** `candidates`: {worker, rank, tiers, load, terms, score}; `words` explains terms. */
export function table(candidates, chosen, words) {
  const scores = candidates.map((one) => Math.abs(one.score ?? 0));
  const most = Math.max(...scores, 1e-9);
  const rows = candidates.map((one) => h("tr", {class: chosen(one) ? "chosen" : null},
    h("th", {scope: "row"}, one.worker, one.rank ? ` rank ${one.rank}` : "", chosen(one) ? h("span", {class: "note"}, " chosen") : null),
    h("td", {}, holds(one.tiers)),
    h("td", {}, load(one.load)),
    h("td", {class: "words"}, sum(one.terms)),
    h("td", {}, one.score === null ? "-" : number(one.score), one.score === null ? null : bar(Math.abs(one.score) / most))));
  const names = [...new Set(candidates.flatMap((one) => Object.entries(one.terms).filter(([, value]) => value).map(([name]) => name)))];
  return [
    h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates"}, h("table", {},
      h("thead", {}, h("tr", {}, ...["worker", "holds", "load", "terms", "score"].map((name) => h("th", {scope: "col", class: name === "terms" ? "words" : null}, name)))),
      h("tbody", {}, rows))),
    names.length ? h("p", {class: "note"}, names.map((name) => `${name}: ${words.terms[name] ?? name}`).join("; ") + ".") : null,
  ];
}

function holds(tiers) {
  const some = Object.entries(tiers ?? {}).filter(([, tokens]) => tokens);
  return some.length ? some.map(([tier, tokens]) => `${count(tokens)} ${tier.replace("_", " ")}`).join(", ") : "nothing";
}

function load(figures) {
  const requests = figures.active_requests ?? 0, prefill = figures.active_prefill_tokens ?? 0;
  return requests || prefill ? `${count(requests)} request${requests === 1 ? "" : "s"}, ${count(prefill)} prefill tokens` : "idle";
}

function sum(terms) {
  const some = Object.entries(terms).filter(([, value]) => value);
  return some.length ? some.map(([name, value], at) => `${value < 0 ? "- " : at ? "+ " : ""}${number(Math.abs(value))} ${name}`).join(" ") : "0";
}
