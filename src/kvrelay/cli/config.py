"""`kvrelay config`: the effective configuration and where each value came from, what keys mean, and their schema."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.gateway_flags import effective_config
from kvrelay.edge.system.config import Config, keys
from kvrelay.edge.system.explained_key import ExplainedKey, explained
from kvrelay.edge.system.urls import mask_credentials

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Show, explain and check the configuration: show, explain, schema, explain-lmcache, lmcache-schema.",
)

CONFIG_FILE = typer.Option(None, "-c", "--config", metavar="FILE", help="Configuration file (default: kvrelay.toml).")


@app.command(
    short_help="Print every effective value with its source.",
    epilog="Example: kvrelay config show -c kvrelay.toml --policy sticky --json",
)
def show(
    file: Path | None = CONFIG_FILE,
    worker: list[str] = typer.Option([], "--worker", metavar="URL", help="As for `kvrelay serve`."),
    policy: str | None = typer.Option(None, "--policy", help="As for `kvrelay serve`."),
    host: str | None = typer.Option(None, "--host", help="As for `kvrelay serve`."),
    port: int | None = typer.Option(None, "--port", help="As for `kvrelay serve`."),
    admin_port: int | None = typer.Option(None, "--admin-port", help="As for `kvrelay serve`."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Print every effective value with its source: flag > environment > file > default. Secrets are masked.

    Takes the flags of `kvrelay serve`, so that it shows what that command would run with.
    """
    config = effective_config(file, workers=worker, policy=policy, host=host, port=port, admin_port=admin_port)
    values = _effective(config)
    if as_json:
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
        return
    width = max(len(dotted) for dotted in values)
    for dotted, entry in values.items():
        sys.stdout.write(f"{dotted:<{width}} = {json.dumps(entry['value'])}  ({entry['source']})\n")


@app.command(
    short_help="Print what keys mean and what changing them does.",
    epilog="Example: kvrelay config explain health.interval_s",
)
def explain(
    key: str | None = typer.Argument(None, help="A key, or a section for all its keys."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Print what each key means, its default and legal range, and what changing it does."""
    wanted = [one for one in map(explained, keys()) if _is_within(one.key, key)]
    if key is not None and not wanted:
        known = [dotted for dotted, _ in keys()]
        nearest = difflib.get_close_matches(key, known, n=8, cutoff=0.3) or sorted({k.split(".")[0] for k in known})
        messages.fail(messages.unknown_name("key", key, nearest, source="the command line"))
    if as_json:
        sys.stdout.write(json.dumps([one.as_dict() for one in wanted], indent=2) + "\n")
    else:
        sys.stdout.write("\n\n".join(map(_explanation, wanted)) + "\n")


@app.command(epilog="Example: kvrelay config schema > kvrelay.schema.json")
def schema() -> None:
    """Print the JSON schema of the configuration file."""
    sys.stdout.write(json.dumps(Config.model_json_schema(), indent=2) + "\n")


@app.command(
    "explain-lmcache",
    short_help="Read an LMCache configuration: what each field becomes here, or why it is refused.",
    epilog="Example: kvrelay config explain-lmcache lmcache.yaml --host-memory 128 --engine-memory 24",
)
def explain_lmcache(
    file: Path = typer.Argument(..., help="LMCache's YAML file, or lines that set LMCACHE_... variables."),
    host_memory: float | None = typer.Option(None, "--host-memory", metavar="GIB", help="Default: this machine's."),
    engine_memory: float = typer.Option(
        8.0, "--engine-memory", metavar="GIB", min=0, help="Host memory of one engine process without any cache."
    ),
    buffer: float | None = typer.Option(
        None, "--buffer", metavar="GIB", min=0, help="To be left free. Default: a tenth of the host's memory."
    ),
    workers: int = typer.Option(1, "--workers", min=1, help="Engine processes on the host."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Explain an LMCache configuration field by field and print it as a [store] section.

    Exit 2 when a field is refused: unknown, dangerous for the machine, or something that is not done here.
    """
    from kvrelay.cli import lmcache_page
    from kvrelay.cli.messages import lmcache as wording
    from kvrelay.edge.connectors.lmcache.reader import Unreadable, read, read_file
    from kvrelay.edge.connectors.lmcache.verdict import Host
    from kvrelay.edge.doctor.machine import memory_bytes

    if host_memory is None:
        found = memory_bytes()
        if found is None:
            messages.fail(wording.no_host_memory())
        host_memory = found / 2**30
    host = Host(
        memory_gib=host_memory,
        engine_gib=engine_memory,
        buffer_gib=host_memory / 10 if buffer is None else buffer,
        workers=workers,
    )
    try:
        reading = read(read_file(file), host)
    except (Unreadable, OSError) as fault:
        messages.fail(wording.unreadable(str(file), fault))
    sys.stdout.write(lmcache_page.as_json(reading) if as_json else lmcache_page.as_text(reading))
    if reading.refused:
        messages.fail(wording.refused(str(file), reading.refused))


@app.command(
    "lmcache-schema",
    short_help="Print the JSON schema that an LMCache configuration is held against.",
    epilog="Example: kvrelay config lmcache-schema > lmcache.schema.json",
)
def lmcache_schema() -> None:
    """Print a JSON schema of LMCache's configuration: types, ranges, and what is refused.

    What depends on the host (does the cache fit?) is judged by `kvrelay config explain-lmcache`.
    """
    from kvrelay.edge.connectors.lmcache.schema import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def _is_within(dotted: str, wanted: str | None) -> bool:
    """Whether a key is the one asked for, or in the section asked for; `workers` names `workers[]`."""
    if wanted is None:
        return True
    plain = dotted.replace("[]", "")
    return wanted in (dotted, plain) or plain.startswith(wanted.replace("[]", "") + ".")


def _explanation(one: ExplainedKey) -> str:
    lines = [f"{one.key} = {json.dumps(one.default)}", f"  {one.meaning}", f"  {one.effect}"]
    if one.unit:
        lines.append(f"  unit: {one.unit}")
    if one.legal:
        lines.append(f"  legal: {one.legal}")
    lines.append(f"  environment: {one.environment}" if one.environment else "  environment: none, it is in a list")
    return "\n".join(lines)


def _effective(config: Config) -> dict[str, dict[str, Any]]:
    return {
        dotted: {"value": _masked(value), "source": config.source_of(dotted)}
        for dotted, value in _leaves(config.model_dump(mode="json"), "")
    }


def _leaves(value: Any, at: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{at}.{name}" if at else name)]
    if isinstance(value, list) and value:
        return [leaf for number, inner in enumerate(value) for leaf in _leaves(inner, f"{at}[{number}]")]
    return [(at, value)]


def _masked(value: Any) -> Any:
    return mask_credentials(value) if isinstance(value, str) and "://" in value else value
