// One picture onto the page.

import {$, bar, h, keyed, show, spark} from "./dom.js";
import {UNAVAILABLE, age, bytes, count, ms, percent, ratio} from "./format.js";
import {tell} from "./receipt.js";

export function draw(picture, words) {
  const {gateway} = picture;
  $("about").textContent = [`version ${gateway.version}`, `up ${age(gateway.uptime_s)}`, `policy ${gateway.policy}${gateway.scorer ? ` (${gateway.scorer})` : ""}`,
    gateway.processes > 1 ? `${gateway.processes} processes` : null, gateway.draining ? "draining" : null].filter(Boolean).join(" · ");
  $("span").textContent = picture.window_s === null ? "Everything below is since the gateway began." : `Numbers are of the last seconds; everything below is of the last ${age(picture.window_s)}.`;
  $("mock").hidden = !picture.workers.some(({engine}) => engine === "mock");
  numbers(picture);
  show($("findings"), picture.findings, findings);
  keyed($("workers"), picture.workers, (worker) => worker.name, () => h("li", {class: "worker"}), drawWorker);
  show($("gates"), picture.tokens, gates);
  show($("claims"), picture.workers.map(({name, claimed_tokens, hit_tokens}) => ({name, claimed_tokens, hit_tokens})), claims);
  keyed($("requests"), picture.flow, (one) => one.request_id, (one) => request(one, words));
  show($("reasons"), picture.reasons, (reasons) => counts(reasons.map(({words: why, count: n}) => [why, n])));
  show($("statuses"), picture.statuses, (statuses) => counts(Object.entries(statuses).sort(([, a], [, b]) => b - a)));
  show($("tierlist"), picture.tiers, tiers);
  show($("tasks"), [picture.tasks, gateway.sessions], tasks);
  show($("results"), picture.results, results);
}

// --- the four numbers

function numbers({numbers: now, history}) {
  const column = (at) => history.map((point) => point[at]);
  const entries = [
    ["Time to first token", now.ttft_p50_s === null ? null : ms(now.ttft_p50_s * 1000), "p50", now.ttft_count ? `p95 ${ms(now.ttft_p95_s * 1000)}, of ${count(now.ttft_count)} requests` : "no request in the last seconds", 0],
    ["Hit rate", now.hit_ratio === null ? null : percent(now.hit_ratio), "", "of tokens that could be hit", 1],
    ["Throughput", now.requests_per_s === null ? null : now.requests_per_s.toFixed(1), "requests/s", now.completion_tokens_per_s === null ? "tokens unavailable" : `${count(now.completion_tokens_per_s)} output tokens/s`, 2],
    ["KV memory in use", now.kv_usage_ratio === null ? null : percent(now.kv_usage_ratio), "", now.kv_fullest ? `of ${now.kv_fullest}, the fullest worker` : "no worker reports it", 3],
  ];
  keyed($("numbers"), entries, ([name]) => name, ([name]) => h("div", {class: "number"}, h("dt", {}, name)), (element, [name, value, unit, sub, at]) => {
    const shown = value === null ? h("dd", {class: "value unavailable"}, UNAVAILABLE) : h("dd", {class: "value"}, value, unit ? h("small", {}, unit) : null);
    element.replaceChildren(h("dt", {}, name), shown, h("dd", {class: "sub"}, sub), h("dd", {}, spark(column(at))));
  });
}

// --- findings

const WORDS = {ok: "well", warn: "Warning", fail: "Trouble", unknown: "not known", not_applicable: "no question"};

function findings(all) {
  const troubled = all.filter(({verdict}) => verdict === "warn" || verdict === "fail");
  const well = all.filter(({verdict}) => verdict === "ok").length;
  const head = troubled.length ? [] : [h("p", {}, h("span", {class: "word ok"}, "No trouble. "), `${well} of ${all.length} questions are answered well; the others cannot be asked or answered yet.`)];
  return [...head, ...troubled.map(finding), h("details", {}, h("summary", {}, "All questions"), h("ul", {class: "answers"}, all.map(answer)))];
}

const finding = (one) => h("div", {class: `finding ${one.verdict}`},
  h("p", {}, h("span", {class: "word"}, `${WORDS[one.verdict]}: `), one.worker ? `${one.worker}: ` : "", one.detail, "."),
  h("p", {class: "note"}, one.cause, " ", h("strong", {}, one.fix), " ", h("a", {href: `/ui/runbooks#${one.code}`}, `runbook: ${one.code}`)));

const answer = (one) => h("li", {}, h("span", {class: `word ${one.verdict}`}, WORDS[one.verdict]), h("span", {}, `${one.code}${one.worker ? ` of ${one.worker}` : ""}: ${one.detail}`));

// --- workers

function drawWorker(card, worker) {
  show(card, worker, (one) => {
    card.className = `worker ${one.state.replaceAll(" ", "-")}`;
    const who = [one.engine, one.version, one.incarnation ? `life ${one.incarnation.slice(-8)}` : null, one.age_s === null ? null : `seen for ${age(one.age_s)}`];
    const hit = ratio(one.hit_tokens, one.claimed_tokens);
    return [
      h("div", {class: "workerhead"}, h("h3", {}, one.name), h("span", {class: "pill"}, one.state)),
      h("p", {class: "who"}, who.filter(Boolean).join(" · ")),
      ["routable", "draining"].includes(one.state) ? null : h("p", {class: "problem"}, one.detail),
      h("div", {class: "meters"},
        meter("KV use", one.kv_usage_ratio, one.kv_usage_ratio > 0.95 ? "high" : ""),
        meter("Hit rate", one.reported_hit_ratio, "hit")),
      h("dl", {class: "facts"},
        fact("active", count(one.active_requests)), fact("waiting there", count(one.reported_waiting)), fact("prefill", `${count(one.active_prefill_tokens)} tokens`),
        fact("index", `${one.index_state ?? UNAVAILABLE}, ${count(one.index_blocks)} blocks`), fact("ended here", count(one.requests)),
        one.claimed_tokens ? fact("hit of claimed", percent(hit)) : null),
      one.unavailable.length ? h("p", {class: "note"}, `unavailable: ${one.unavailable.join(", ").replaceAll("_", " ")}`) : null,
    ].filter(Boolean);
  });
}

const meter = (name, value, kind) => [h("span", {}, name), bar(value, kind), h("span", {}, percent(value))];
const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

// --- tokens

function gates(tokens) {
  const parts = [["hit", "hit", tokens.hit], ...tokens.gates.map(({gate, words, tokens: lost}) => [gate, `lost: ${words}`, lost]), ["unknown", "the answer does not say", tokens.unaccounted]];
  const whole = parts.reduce((sum, [, , value]) => sum + (value ?? 0), 0);
  if (!whole) return h("p", {}, "No prompt had tokens that could be hit.");
  const stack = h("div", {class: "stack", "aria-hidden": "true"});
  for (const [kind, , value] of parts) if (value) { const part = h("i", {class: `${kind}-c`}); part.style.width = `${100 * value / whole}%`; stack.append(part); }
  return [stack, h("ul", {class: "legend"}, parts.map(([kind, name, value]) => h("li", {}, h("i", {class: `${kind}-c`, "aria-hidden": "true"}), h("span", {}, name),
    h("strong", {}, value === null ? UNAVAILABLE : `${count(value)} (${percent(value / whole)})`))))];
}

function claims(workers) {
  const most = Math.max(1, ...workers.map((one) => Math.max(one.claimed_tokens, one.hit_tokens)));
  const rows = workers.map((one) => h("tr", {}, h("th", {scope: "row"}, one.name),
    h("td", {}, count(one.claimed_tokens)), h("td", {}, bar(one.claimed_tokens / most, "claimed"), bar(one.hit_tokens / most, "hit")),
    h("td", {}, count(one.hit_tokens)), h("td", {}, count(one.hit_tokens - one.claimed_tokens))));
  const heads = ["worker", "claimed tokens", "claimed above, hit below", "hit tokens", "hit - claimed"];
  return h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Claimed and hit tokens by worker"}, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((name) => h("th", {scope: "col"}, name)))), h("tbody", {}, rows)));
}

// --- requests

function request(one, words) {
  const hit = one.actual_cached_tokens, could = one.eligible_prefix_tokens;
  const tokens = could === null ? "not matched" : `${hit === null ? UNAVAILABLE : count(hit)} of ${count(could)}, claimed ${count(one.matched_tokens_at_route)}`;
  const ended = one.status === "ok" ? ms(one.e2e_ms) : one.status.replaceAll("_", " ");
  return h("li", {}, h("button", {type: "button", onclick: () => tell(one.request_id, words)},
    h("span", {class: "where"}, one.chosen_worker ?? "nobody"), h("span", {class: "why"}, one.words),
    h("span", {class: "tokens"}, bar(ratio(hit, could), "hit"), label("hit"), tokens),
    h("span", {class: "ttft"}, label("first token"), one.ttft_ms === null ? "-" : ms(one.ttft_ms)),
    h("span", {class: one.status === "ok" ? "end" : "end bad"}, label("ended"), ended)));
}

/** The head of its column, for those who do not see one. */
const label = (text) => h("span", {class: "label"}, `${text} `);

function counts(entries) {
  if (!entries.length) return h("p", {class: "note"}, "none yet");
  const most = Math.max(...entries.map(([, n]) => n));
  return entries.map(([name, n]) => h("div", {class: "count"}, h("span", {}, name.replaceAll("_", " ")), h("strong", {}, count(n)), bar(n / most)));
}

// --- tiers, sessions, evidence

function tiers(all) {
  if (!all.length) return h("p", {}, "Nothing is known to lie in any tier.");
  const hasStore = all.some((one) => Object.keys(one.outcomes).length);
  const heads = ["tier", "blocks in the index", "claimed tokens", "hits by the workers' own count", ...(hasStore ? ["operations", "read", "p95"] : [])];
  const rows = all.map((one) => h("tr", {}, h("th", {scope: "row"}, one.tier.replaceAll("_", " "), one.out_of_use ? h("span", {class: "problem"}, " out of use") : null),
    h("td", {}, count(one.index_blocks)), h("td", {}, count(one.claimed_tokens)), h("td", {}, count(one.reported_hit_tokens)),
    ...(hasStore ? [h("td", {class: "words"}, Object.entries(one.outcomes).map(([name, n]) => `${name} ${count(n)}`).join(", ") || "-"), h("td", {}, bytes(one.read_bytes)), h("td", {}, ms(one.p95_s === null ? null : one.p95_s * 1000))] : [])));
  return [h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Tiers"}, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((name) => h("th", {scope: "col", class: name === "operations" ? "words" : null}, name)))), h("tbody", {}, rows))),
    hasStore ? null : h("p", {class: "note"}, "No store reports here: workers hold what they computed themselves.")].filter(Boolean);
}

function tasks([{ok, failed, cancelled}, bound]) {
  const ended = (ok ?? 0) + (failed ?? 0) + (cancelled ?? 0);
  const share = ended ? `${percent((ok ?? 0) / ended)} of them succeeded as a whole (${count(failed ?? 0)} failed, ${count(cancelled ?? 0)} cancelled)` : "none of them is over yet, so no whole task can be judged";
  return [`${count(bound)} sessions are bound to a worker. ${count(ended)} sessions ended; ${share}.`];
}

export function sessions(all) {
  if (!all.length) return h("p", {}, "No session is bound.");
  const rows = all.slice(0, 100).map((one) => h("tr", {}, h("th", {scope: "row"}, one.session_id), h("td", {}, one.worker), h("td", {}, one.incarnation.slice(-8))));
  return [h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Bound sessions"}, h("table", {},
    h("thead", {}, h("tr", {}, ["session", "worker", "life"].map((name) => h("th", {scope: "col"}, name)))), h("tbody", {}, rows))),
    all.length > 100 ? h("p", {class: "note"}, `and ${count(all.length - 100)} more`) : null].filter(Boolean);
}

function results({folder, results: all, unreadable, badge}) {
  if (folder === null) return h("p", {}, "No folder with results is named. Set ", h("code", {}, "observe.results"), " to where drills and gates write theirs.");
  const rows = all.map((one) => h("details", {}, h("summary", {}, h("span", {class: `word ${one.verdict}`}, one.verdict), ` ${one.kind} ${one.name}`),
    h("p", {class: "note"}, `${one.about}; ${one.at}`), h("ul", {class: "answers"}, one.details.map(([verdict, said]) => h("li", {}, h("span", {class: `word ${verdict}`}, verdict), h("span", {}, said))))));
  return [badge ? h("p", {}, h("span", {class: "badge"}, "All drills passed: predictable when the cache fails")) : null,
    all.length ? null : h("p", {}, `There are no results in ${folder} yet.`), ...rows,
    unreadable.length ? h("p", {class: "problem"}, `not readable: ${unreadable.join(", ")}`) : null].filter(Boolean);
}
