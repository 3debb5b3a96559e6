// Connects, draws each picture, and obeys the buttons.

import {$, show} from "./dom.js";
import {Link, ask} from "./link.js";
import {draw, sessions} from "./view.js";
import * as whatif from "./whatif.js";

const words = await (await fetch("/ui/words.json")).json();
let states = null;

const link = new Link((picture) => { draw(picture, words); speak(picture.workers); }, (state, text) => {
  $("link").className = `link ${state}`;
  const shown = $("link").querySelector(".text");
  if (shown.textContent !== text) shown.textContent = text;
});

/** Only what changes a decision is spoken: a worker that came, went or stopped. */
function speak(workers) {
  const now = new Map(workers.map(({name, state}) => [name, state]));
  if (states !== null) {
    const changed = [...now].filter(([name, state]) => states.get(name) !== state).map(([name, state]) => `worker ${name} is ${state}`);
    const gone = [...states.keys()].filter((name) => !now.has(name)).map((name) => `worker ${name} was removed`);
    if (changed.length + gone.length) $("spoken").textContent = [...changed, ...gone].join(", ");
  }
  states = now;
}

$("pause").addEventListener("click", () => {
  const paused = $("pause").getAttribute("aria-pressed") === "true";
  $("pause").setAttribute("aria-pressed", String(!paused));
  if (paused) link.start(); else link.stop("paused");
});
document.addEventListener("visibilitychange", () => {
  if ($("pause").getAttribute("aria-pressed") === "true") return;
  if (document.hidden) link.stop("paused while hidden"); else link.start();
});

const THEMES = ["system", "light", "dark"];
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
  document.documentElement.dataset.theme = next;
  $("theme").textContent = `Theme: ${next}`;
});

$("list-sessions").addEventListener("click", async () => {
  const open = $("list-sessions").getAttribute("aria-expanded") === "true";
  $("list-sessions").setAttribute("aria-expanded", String(!open));
  $("sessionlist").hidden = open;
  if (open) return;
  const {sessions: all} = await (await ask("/admin/sessions")).json();
  show($("sessionlist"), all, sessions);
});

$("close-receipt").addEventListener("click", () => $("receipt").close());
whatif.watch(words);
link.start();
