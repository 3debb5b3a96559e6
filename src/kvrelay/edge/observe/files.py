"""Dashboard, alert rules and the table as text, as they are printed and kept in `deploy/` and `docs/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from kvrelay.core.doctor.known import TESTED
from kvrelay.edge.connectors.metrics_page import CANONICAL
from kvrelay.edge.connectors.registry import CONNECTORS
from kvrelay.edge.observe.alerts import RUNBOOKS, rule_file
from kvrelay.edge.observe.dashboard import dashboard
from kvrelay.edge.observe.metric_table import Row, of_row

PAGES_OF_ENGINES = ("vllm", "sglang", "llamacpp")


def grafana_json() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


def rules_yaml(runbooks: str = RUNBOOKS) -> str:
    """Every value is a JSON string, which is a YAML string as well, so no quoting rule of YAML matters."""
    lines = ["# Made by `kvrelay dashboard alerts`.", "groups:"]
    for group in rule_file(runbooks)["groups"]:
        lines += [f"  - name: {group['name']}", "    rules:"]
        for rule in group["rules"]:
            lines += [f"      - alert: {rule['alert']}", f"        expr: {json.dumps(rule['expr'])}"]
            lines += [f"        for: {rule['for']}"]
            lines += [*_mapping("labels", rule["labels"]), *_mapping("annotations", rule["annotations"])]
    return "\n".join(lines) + "\n"


def _mapping(name: str, values: Mapping[str, str]) -> Iterator[str]:
    yield f"        {name}:"
    yield from (f"          {key}: {json.dumps(value)}" for key, value in values.items())


def metrics_markdown() -> str:
    """The table for people, with what each engine's page calls what we read there."""
    lines = [
        "# Metrics",
        "",
        "Made by `kvrelay dashboard metrics` of the table in `edge/observe/metric_table.py`. What is unavailable is",
        "absent from the page, never 0, and `kvrelay_source_available` is 0 for it.",
    ]
    for row in Row:
        lines += [
            "",
            f"## {row.value}",
            "",
            "| name | type | unit | labels | meaning | source |",
            "|---|---|---|---|---|---|",
        ]
        for spec in of_row(row):
            labels = ", ".join(spec.labels) or "-"
            lines.append(
                f"| `{spec.name}` | {spec.kind} | {spec.unit} | {labels} | {spec.meaning} | {_source(spec.source)} |"
            )
    return "\n".join([*lines, *_engines()]) + "\n"


def _source(source: str) -> str:
    return f"worker's page: `{source.partition(':')[2]}`" if source.startswith("page:") else source


def _engines() -> Iterator[str]:
    yield ""
    yield "## What workers' pages are read for"
    yield ""
    yield "Names of the newest release first; releases differ in the suffix `_total`, both are read. Versions in the"
    yield "head are those that the names were held against. `kvrelay scrape-map URL` shows one worker as it is."
    yield ""
    heads = [f"{engine} ({', '.join(TESTED.get(engine, ())) or 'by its protocol'})" for engine in PAGES_OF_ENGINES]
    yield f"| canonical name | unit | {' | '.join(heads)} |"
    yield "|" + "---|" * (2 + len(heads))
    for name, unit in CANONICAL.items():
        spelled = [CONNECTORS[engine].metrics.names[name] for engine in PAGES_OF_ENGINES]
        cells = [", ".join(f"`{one}`" for one in names) or "unavailable" for names in spelled]
        yield f"| `{name}` | {unit} | {' | '.join(cells)} |"
    yield ""
    yield "vLLM's prefix cache counters count tokens, neither blocks nor requests. The share of prompts that was hit is"
    yield ""
    yield "```promql"
    yield "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))"
    yield "```"
    yield ""
    yield "and for all engines alike, from our page:"
    yield ""
    yield "```promql"
    yield "sum(rate(kvrelay_reported_prefix_hits_tokens[5m])) / sum(rate(kvrelay_reported_prefix_queries_tokens[5m]))"
    yield "```"
