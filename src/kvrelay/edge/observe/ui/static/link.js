// The connection: one stream of pictures, and questions. The token lives in this module and nowhere else.

import {$} from "./dom.js";

const FIRST_WAIT_MS = 1000, LONGEST_WAIT_MS = 15000;
let token = null;

/** Raises an Error with the gateway's own words. */
export async function ask(path, options = {}) {
  for (;;) {
    const headers = {...options.headers, ...(token ? {authorization: `Bearer ${token}`} : {})};
    const answer = await fetch(path, {...options, headers});
    if (answer.status === 401) { await askForToken(); continue; }
    if (!answer.ok) {
      const text = await answer.text();
      let said = text;
      try { said = JSON.parse(text).error.message ?? text; } catch { /* not ours */ }
      throw new Error(said || `answered ${answer.status}`);
    }
    return answer;
  }
}

let asking = null;
function askForToken() {
  if (token) $("token-why").textContent = "That was not the token of this gateway.";
  asking ??= new Promise((resolve) => {
    const dialog = $("token");
    $("token-form").onsubmit = () => { token = $("token-value").value.trim(); $("token-value").value = ""; };
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => { asking = null; resolve(); };
    dialog.showModal();
  });
  return asking;
}

/** Pictures as they come, from `start()` to `stop()`; it connects again by itself. `say(state, words)`. */
export class Link {
  constructor(onPicture, say) { this.onPicture = onPicture; this.say = say; this.stopped = true; this.abort = null; }

  start() {
    if (!this.stopped) return;
    this.stopped = false;
    this.run();
  }

  stop(words) {
    this.stopped = true;
    this.abort?.abort();
    this.say("paused", words);
  }

  async run() {
    const abort = this.abort = new AbortController();
    let wait = FIRST_WAIT_MS;
    while (!abort.signal.aborted) {
      try {
        const answer = await ask("/ui/stream", {signal: abort.signal});
        wait = FIRST_WAIT_MS;
        await this.read(answer.body.getReader());
      } catch (problem) {
        if (abort.signal.aborted) return;
        console.debug(problem);
      }
      if (abort.signal.aborted) return;
      this.say("lost", `connection lost, next try in ${Math.round(wait / 1000)} s`);
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      rest += decoder.decode(value, {stream: true});
      const events = rest.split("\n\n");
      rest = events.pop();
      const last = events.filter((event) => event.startsWith("data: ")).pop();
      if (last) { this.say("live", "live"); this.onPicture(JSON.parse(last.slice(6))); }
    }
  }
}
