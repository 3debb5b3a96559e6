// Where would a request go? Nothing is dispatched.

import {table} from "./candidates.js";
import {$, h} from "./dom.js";
import {ask} from "./link.js";

export function watch(words) {
  $("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    const session = $("session").value.trim();
    const headers = {"content-type": "application/json", ...(session ? {"x-session-id": session} : {})};
    try {
      JSON.parse($("body").value);
      const answer = await ask("/admin/match", {method: "POST", body: $("body").value, headers});
      $("answer").replaceChildren(...told(await answer.json(), words));
    } catch (problem) {
      $("answer").replaceChildren(h("p", {class: "problem"}, problem.message));
    }
  });
}

function told(answer, words) {
  const why = words.reasons[answer.reason] ?? answer.reason;
  const sentence = answer.chosen ? `It would go to ${answer.chosen}, because ${why}.` : `It would go to nobody: ${why}.`;
  const tokens = answer.prompt_tokens === null ? "Its length is not known." : `Its prompt has ${answer.prompt_tokens.toLocaleString("en")} tokens.`;
  const unscored = answer.unscored_because ? ` It was not matched: ${answer.unscored_because}.` : "";
  return [h("p", {class: "first"}, sentence), h("p", {}, tokens + unscored),
    ...table(answer.candidates, (one) => one.worker === answer.chosen, words)].filter(Boolean);
}
