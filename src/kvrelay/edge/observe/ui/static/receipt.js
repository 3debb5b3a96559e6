// One receipt, told in words.

import {table} from "./candidates.js";
import {$, h} from "./dom.js";
import {ask} from "./link.js";

export async function tell(requestId, words) {
  const body = $("receipt-body");
  $("receipt-h").textContent = `Receipt ${requestId}`;
  body.replaceChildren(h("p", {class: "note"}, "asking"));
  if (!$("receipt").open) $("receipt").showModal();
  try {
    const answer = await (await ask(`/ui/receipts/${encodeURIComponent(requestId)}`)).json();
    body.replaceChildren(...told(answer, words));
  } catch (problem) {
    body.replaceChildren(h("p", {class: "problem"}, problem.message));
  }
}

function told({text, receipt, adds_up}, words) {
  const sentences = text.split("\n").filter((line) => !/^ {4}/.test(line) && !/^ {2}Candidates, /.test(line));
  const same = (one) => one.worker === receipt.chosen_worker && one.incarnation === receipt.incarnation && one.rank === receipt.rank;
  const candidates = receipt.candidates.map((one) => ({...one, tiers: one.matched_tokens}));
  return [
    ...sentences.map((line, at) => h("p", {class: at ? null : "first"}, line.trim())),
    ...(candidates.length ? [h("h3", {}, `Candidates, ${candidates.length} of ${receipt.candidates_total}`), ...table(candidates, same, words)] : []),
    adds_up ? null : h("p", {class: "problem"}, "The terms of a candidate do not sum to its score."),
  ].filter(Boolean);
}
