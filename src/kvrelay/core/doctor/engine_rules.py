"""Is the worker itself set up so that routing by cache can work, and be seen to work?"""

from __future__ import annotations

from kvrelay.core.doctor.facts import Facts, WorkerFacts
from kvrelay.core.doctor.finding import Judged, Verdict, WorkerRule, fail, not_applicable, ok, unknown, warn
from kvrelay.core.doctor.known import PUBLISHES_EVENTS, TESTED

CLOCK_WARN_S, CLOCK_FAIL_S = 2.0, 60.0
COLD_RATIO, COLD_EXTRA_S = 5.0, 1.0


def _reachable(_: Facts, worker: WorkerFacts) -> Judged:
    return fail(worker.problem) if worker.problem is not None else ok(f"{worker.engine} answers")


def _version(_: Facts, worker: WorkerFacts) -> Judged:
    if worker.problem is not None or worker.engine is None:
        return unknown("the worker could not be asked")
    if worker.engine == "mock":
        return ok("kvrelay's own mock worker")
    if worker.engine not in TESTED:
        return warn(f"{worker.engine} {worker.version or ''}".rstrip() + ": tested against its protocol only")
    if worker.version is None:
        return unknown(f"{worker.engine} does not say its version")
    if worker.version.startswith(TESTED[worker.engine]):
        return ok(f"{worker.engine} {worker.version}, tested")
    return warn(f"{worker.engine} {worker.version}; tested: {', '.join(TESTED[worker.engine])}")


def _metrics(_: Facts, worker: WorkerFacts) -> Judged:
    match worker.has_metrics:
        case None:
            return unknown("not asked")
        case False:
            return fail("no metrics page") if _should_have(worker) else warn("no metrics page")
    if worker.missing_metrics:
        return warn(f"the page lacks {', '.join(worker.missing_metrics)}")
    return ok("load and cache counters are there")


def _prefix_caching(_: Facts, worker: WorkerFacts) -> Judged:
    enabled = (worker.cache_settings or {}).get("enable_prefix_caching")
    if enabled is not None and enabled.lower() in ("false", "none", "0"):
        return fail(f"enable_prefix_caching is {enabled}")
    probe = worker.probe
    if probe is None or probe.problem is not None:
        return ok("enabled, by its own word") if enabled is not None else unknown("no probe was answered")
    if probe.cached_second is None:
        return ok("enabled, by its own word") if enabled is not None else unknown("hits are not reported")
    if probe.cached_second == 0:
        return fail(f"a prompt of {probe.prompt_tokens} tokens, sent again at once, hit nothing")
    return ok(f"{probe.cached_second} of {probe.prompt_tokens} tokens hit when sent again")


def _usage(_: Facts, worker: WorkerFacts) -> Judged:
    probe = worker.probe
    if probe is None or probe.problem is not None:
        return unknown("no probe was answered")
    if not probe.usage_seen:
        return warn("answers carry no usage at all")
    if probe.cached_second is None:
        said = "usage has no prompt_tokens_details.cached_tokens"
        return fail(said) if _should_have(worker) else warn(said)
    return ok("cached tokens are reported per request")


def _should_have(worker: WorkerFacts) -> bool:
    """Engines that can do it, if they are told to."""
    return worker.engine in PUBLISHES_EVENTS


def _counted(_: Facts, worker: WorkerFacts) -> Judged:
    probe = worker.probe
    if probe is None or probe.problem is not None or probe.counted_prompt_tokens is None:
        return unknown("no probe was counted")
    if probe.counted_prompt_tokens == probe.prompt_tokens:
        return ok(f"{probe.prompt_tokens} token ids arrived as {probe.counted_prompt_tokens} tokens")
    return warn(f"{probe.prompt_tokens} token ids arrived as {probe.counted_prompt_tokens} tokens")


def _clock(_: Facts, worker: WorkerFacts) -> Judged:
    offsets = [source.clock_ahead_s for source in worker.sources if source.clock_ahead_s is not None]
    ahead_s = offsets[0] if offsets else worker.clock_ahead_s
    if ahead_s is None:
        return unknown("neither an event nor a Date header tells its time")
    side = "ahead of" if ahead_s > 0 else "behind"
    said = f"{abs(ahead_s):.1f} s {side} ours"
    if abs(ahead_s) > CLOCK_FAIL_S:
        return fail(said)
    return warn(said) if abs(ahead_s) > CLOCK_WARN_S else ok(f"within {CLOCK_WARN_S:g} s of ours")


def _cold(_: Facts, worker: WorkerFacts) -> Judged:
    probe = worker.probe
    if probe is None or probe.first_s is None or probe.second_s is None:
        return unknown("no probe was answered")
    said = f"the first probe took {probe.first_s:.2f} s, the second {probe.second_s:.2f} s"
    slow = probe.first_s > COLD_RATIO * probe.second_s and probe.first_s - probe.second_s > COLD_EXTRA_S
    return warn(said) if slow else ok(said)


def _http_open(_: Facts, worker: WorkerFacts) -> Judged:
    if worker.http_open_to_all is None:
        return not_applicable("it runs on another machine")
    return warn("its HTTP port listens on all interfaces") if worker.http_open_to_all else ok("loopback only")


def _tokenizer(facts: Facts, worker: WorkerFacts) -> Judged:
    return _compare(facts, worker, "text")


def _template(facts: Facts, worker: WorkerFacts) -> Judged:
    verdicts = [_compare(facts, worker, probe) for probe in ("chat", "tools")]
    by_weight = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.OK)
    return min(verdicts, key=lambda judged: by_weight.index(judged.verdict))


def _compare(facts: Facts, worker: WorkerFacts, probe: str) -> Judged:
    if facts.tokenizer.path is None:
        return not_applicable("`tokens.tokenizer` is not set: the workers are asked")
    if facts.tokenizer.problem is not None:
        return fail(f"{facts.tokenizer.path} cannot be used: {facts.tokenizer.problem}")
    ours, theirs = facts.tokenizer.tokens.get(probe), worker.tokens.get(probe)
    if ours is None:
        return unknown(f"{probe}: not tokenized here")
    if theirs is None:
        return unknown(f"{probe}: not tokenized by the worker")
    return ok(f"{probe}: {len(ours)} equal token ids") if ours == theirs else fail(difference(probe, ours, theirs))


def difference(
    probe: str, ours: tuple[int, ...], theirs: tuple[int, ...], *, here: str = "here", there: str = "there"
) -> str:
    """Where two lists of token ids part."""
    common = min(len(ours), len(theirs))
    first = next((i for i in range(common) if ours[i] != theirs[i]), common)
    return f"{probe}: from token {first} on, {len(ours)} tokens {here} and {len(theirs)} {there}"


ENGINE_RULES = (
    WorkerRule(
        code="reachable",
        setting="url",
        asks="Does the worker answer?",
        cause="The address is wrong, the process is down, or it wants a key.",
        fix="Check `url` and `api_key_file`, and that the process runs.",
        essential=True,
        judge=_reachable,
    ),
    WorkerRule(
        code="engine_version",
        setting="adapter",
        asks="Was kvrelay tested against this engine and version?",
        cause="Formats of events and metrics differ between releases; with this one nobody has held them against ours.",
        fix="Prefer a tested version, or run `make test-real` against this one.",
        judge=_version,
    ),
    WorkerRule(
        code="metrics",
        setting="url",
        asks="Does the worker report its load and its cache counters?",
        cause="The router then knows only the load that it sent itself, and cannot notice events that never come.",
        fix="Let the engine serve /metrics at `url` (llama.cpp: --metrics; SGLang: --enable-metrics).",
        judge=_metrics,
    ),
    WorkerRule(
        code="prefix_caching",
        setting="engine",
        asks="Does the worker reuse cached prefixes?",
        cause="The engine runs without prefix caching: no policy can gain anything on it.",
        fix="Start the engine with prefix caching on (vLLM: --enable-prefix-caching).",
        judge=_prefix_caching,
    ),
    WorkerRule(
        code="usage_details",
        setting="engine",
        asks="Does it report per request how many tokens it took from its cache?",
        cause="Claims cannot be held against actual hits: receipts say null, and lost events are not found.",
        fix="Start vLLM with --enable-prompt-tokens-details (SGLang: --enable-cache-report).",
        judge=_usage,
    ),
    WorkerRule(
        code="token_count",
        setting="engine",
        asks="Do token ids reach the model as they are sent?",
        cause="Something adds or removes tokens, so the prompt that is cached is not the one that is matched.",
        fix="Turn off what changes prompts in front of the model.",
        judge=_counted,
    ),
    WorkerRule(
        code="tokenizer",
        setting="tokens.tokenizer",
        asks="Does the router's tokenizer say what the worker's says?",
        cause="The router matches other token ids than the ones that are computed: its hits are misjudged.",
        fix="Point `tokens.tokenizer` at the tokenizer.json of the served revision, or remove it.",
        judge=_tokenizer,
    ),
    WorkerRule(
        code="template",
        setting="tokens.template",
        asks="Does the router render chats as the worker does?",
        cause="Another chat template, or another option of it, is in use there.",
        fix="Point `tokens.template` at the served template, or remove `tokens.tokenizer`.",
        judge=_template,
    ),
    WorkerRule(
        code="clock",
        setting="host",
        asks="Does the worker's clock agree with ours?",
        cause="Logs and events of the two cannot be put in order, and certificates and tokens may be refused.",
        fix="Run a time service (chrony, systemd-timesyncd) on both machines.",
        judge=_clock,
    ),
    WorkerRule(
        code="cold_start",
        setting="health",
        asks="Was the worker warmed up before it got traffic?",
        cause="Its first request paid for one-off work such as compilation; after the next start a user's will.",
        fix="Send a warm-up request before the worker's health check passes, or add it only after one.",
        judge=_cold,
    ),
    WorkerRule(
        code="http_open",
        setting="url",
        asks="Can the worker be reached past the gateway?",
        cause="Requests that do not come through the gateway have no tenant, and their load is unknown to it.",
        fix="Bind the engine to loopback (--host 127.0.0.1) or close its port to others.",
        judge=_http_open,
    ),
)
