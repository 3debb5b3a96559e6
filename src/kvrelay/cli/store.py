"""`kvrelay store`: serve one, look into one, keep one clean."""

from __future__ import annotations

import json
import signal
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import store as words
from kvrelay.core.contract.fields import Contract, ContractError
from kvrelay.edge.stores.audit import Inspected, inspect, purge, scrub
from kvrelay.edge.stores.backends import BACKENDS, try_store
from kvrelay.edge.stores.config import StoreConfigError, open_store
from kvrelay.edge.stores.contracts import other_contracts
from kvrelay.edge.stores.scope import scope_of
from kvrelay.edge.stores.server import StoreServer
from kvrelay.edge.stores.store import Store, StoreError

DEADLINE_S = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Stores of KV objects: serve one to peers, list, verify, purge and scrub any.",
)

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="memory://NAME, file:///DIR, valkey://HOST:PORT, s3://..., peer://HOST:PORT."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]
_SERVE_EXAMPLE = "Example: kvrelay store serve --port 8200 --bytes 8000000000"
_PURGE_EXAMPLE = "Example: kvrelay store purge valkey://127.0.0.1:6379 --tenant 5f0c2ad199e14d27"
_EXAMPLE = "Example: kvrelay store {} file:///var/cache/kvrelay"


@app.command(
    "serve", epilog="Example: kvrelay store serve --port 8200 --bytes 8000000000", short_help="Serve a store to peers."
)
def serve(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The store to serve.")] = "memory://",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8200,
    capacity: Annotated[int | None, typer.Option("--bytes", help="Most bytes kept.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Shared secret that peers must know.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow other machines without TLS and token.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a store to peers (`peer://HOST:PORT`) until SIGTERM or Ctrl-C. By default this process's own memory."""
    if host not in LOOPBACK and not insecure and (tls_cert is None or token_file is None):
        messages.fail(words.NOT_LOOPBACK)
    if insecure and host not in LOOPBACK:
        messages.say(words.INSECURE)
    with _opened(url, capacity) as store:
        try:
            token = None if token_file is None else token_file.read_text().strip()
            server = StoreServer(store, host=host, port=port, token=token, tls=_server_tls(tls_cert, tls_key))
        except OSError as error:
            messages.fail(words.unavailable(f"{host}:{port}", error.strerror or str(error)))
        address = f"peer://{host}:{server.port}"
        messages.say(words.serving(address, store.kind))
        if as_json:
            _print({"url": address, "kind": store.kind})
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()
        server.close()


@app.command("ls", epilog=_EXAMPLE.format("ls"), short_help="List what lies in a store.")
def ls(
    url: Url,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's, by the tag that `ls` shows.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """List objects with what their heads say. Tenants appear by their tag, never by name."""
    with _opened(url) as store:
        for shown, found in enumerate(inspect(store, prefix=_tag(tenant), deadline_s=DEADLINE_S, payloads=False)):
            if shown >= limit:
                break
            _print(_as_dict(found)) if as_json else sys.stdout.write(words.object_line(found) + "\n")


@app.command("verify", epilog=_EXAMPLE.format("verify"), short_help="Verify every object; compare contracts.")
def verify(
    url: Url,
    contract: Annotated[
        Path | None, typer.Option(help="A compatibility contract (JSON): say why its objects are not hit.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every object and verify it, without keys. Ends with 1 if one is damaged, with 3 if there is none at all.

    With --contract it names the members in which contracts of stored objects differ from yours.
    """
    mine = None if contract is None else _read_contract(contract)
    counts: Counter[str] = Counter()
    of_contract: Counter[bytes] = Counter()
    stored_bytes = 0
    with _opened(url) as store:
        for found in inspect(store, deadline_s=DEADLINE_S, payloads=True):
            counts[found.outcome.value] += 1
            stored_bytes += found.stored_bytes
            if found.header is not None:
                of_contract[found.header.contract_digest] += 1
            if found.outcome != "hit" and not as_json:
                sys.stdout.write(words.object_line(found) + "\n")
        others = [] if mine is None else list(other_contracts(store, mine, deadline_s=DEADLINE_S))
    if as_json:
        others_shown = [
            {"contract": o.digest.hex(), "objects": of_contract[o.digest], "differs": o.differs} for o in others
        ]
        _print({"counts": counts, "stored_bytes": stored_bytes, "other_contracts": others_shown})
    else:
        sys.stdout.write(words.verified(counts, stored_bytes) + "\n")
        if mine is not None:
            sys.stdout.write(words.same_contract(of_contract[mine.digest()]) + "\n")
        for other in others:
            sys.stdout.write(words.other_contract(other, of_contract[other.digest]) + "\n")
    if not counts:
        raise typer.Exit(messages.UNKNOWN)
    if counts.total() > counts["hit"]:
        raise typer.Exit(messages.VERDICT_FAIL)


@app.command("purge", epilog=_PURGE_EXAMPLE, short_help="Delete by tenant, epoch or contract.")
def purge_command(
    url: Url,
    tenant: Annotated[str | None, typer.Option(help="All of this tenant, by the tag that `ls` shows.")] = None,
    epoch_below: Annotated[int | None, typer.Option(help="All of earlier epochs than this.")] = None,
    contract: Annotated[str | None, typer.Option(help="All of this contract, by the start of its digest.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All objects.")] = False,
) -> None:
    """Delete objects and print the audit record, a JSON line. Ends with 1 if some are still listed afterwards."""
    if tenant is None and epoch_below is None and contract is None and not everything:
        messages.fail(words.PURGE_WHAT)

    def wanted(found: Inspected) -> bool:
        header = found.header
        if header is None:
            return everything or (tenant is not None and epoch_below is None and contract is None)
        return (epoch_below is None or header.epoch < epoch_below) and (
            contract is None or header.contract_digest.hex().startswith(contract)
        )

    what = [f"tenant {tenant}" if tenant else "", f"epochs below {epoch_below}" if epoch_below is not None else ""]
    what += [f"contract {contract}" if contract else "", "all" if everything else ""]
    with _opened(url) as store:
        name = ", ".join(part for part in what if part)
        record = purge(store, url, name, wanted, prefix=_tag(tenant), deadline_s=DEADLINE_S)
    _print(msgspec.structs.asdict(record))
    messages.say(words.purged(record))
    if record.left:
        raise typer.Exit(messages.VERDICT_FAIL)


@app.command("stats", epilog=_EXAMPLE.format("stats"), short_help="How much lies in a store.")
def stats(url: Url, as_json: AsJson = False) -> None:
    """Objects, bytes and limits, as far as the store can say."""
    with _opened(url) as store:
        found = store.stats(deadline_s=DEADLINE_S)
    _print(msgspec.structs.asdict(found)) if as_json else sys.stdout.write(words.stats(url, found) + "\n")


@app.command("scrub", epilog=_EXAMPLE.format("scrub"), short_help="Delete what can never be a hit.")
def scrub_command(url: Url, as_json: AsJson = False) -> None:
    """Delete damaged and expired objects, and pieces of chunks that were never completed."""
    with _opened(url) as store:
        for found in scrub(store, deadline_s=DEADLINE_S):
            _print(_as_dict(found)) if as_json else sys.stdout.write(words.scrubbed(found) + "\n")


@app.command(
    "backends",
    epilog="Example: kvrelay store backends valkey://127.0.0.1:6379 file:///var/cache/kvrelay",
    short_help="What kinds of store there are, and whether they work here.",
)
def backends(
    urls: Annotated[list[str] | None, typer.Argument(metavar="[URL]...", help="Stores to try.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all kinds of store and whether this installation can use them; with URLs, try those stores instead: each is
    given one small object, which is read back and deleted. Ends with 1 if one of these does not work.
    """
    if not urls:
        for backend in BACKENDS:
            missing = backend.missing()
            if as_json:
                about = {"medium": backend.medium.value, "scope": backend.scope.value, "what": backend.what}
                _print({"url": backend.url, **about, "available": missing is None, "problem": missing})
            else:
                sys.stdout.write(words.backend(backend, missing) + "\n")
        return
    tried = {url: try_store(url, deadline_s=DEADLINE_S) for url in urls}
    for url, one in tried.items():
        if as_json:
            _print({"url": url, "scope": scope_of(url).value, **msgspec.structs.asdict(one)})
        else:
            sys.stdout.write(words.tried(url, one) + "\n")
    if any(one.problem is not None for one in tried.values()):
        raise typer.Exit(messages.VERDICT_FAIL)


@contextmanager
def _opened(url: str, capacity_bytes: int | None = None) -> Iterator[Store]:
    """The store, closed in the end; its failures end the command in words."""
    try:
        store = open_store(url, capacity_bytes=capacity_bytes, deadline_s=DEADLINE_S)
    except (StoreConfigError, StoreError, ValueError) as error:
        messages.fail(f"error: {error}")
    try:
        yield store
    except StoreError as error:
        messages.fail(words.unavailable(url, str(error)), messages.UNKNOWN)
    finally:
        store.close()


def _read_contract(path: Path) -> Contract:
    try:
        return Contract.from_mapping(json.loads(path.read_bytes()), source=str(path))
    except (OSError, ValueError, ContractError) as error:
        messages.fail(messages.unusable_input(str(path), error))


def _tag(tenant: str | None) -> bytes:
    try:
        return b"" if tenant is None else bytes.fromhex(tenant)
    except ValueError:
        messages.fail(
            messages.bad_value("--tenant", tenant, "a tag in hexadecimal, as `ls` shows it", source="the command line")
        )


def _server_tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def _as_dict(found: Inspected) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": found.name.hex(),
        "stored_bytes": found.stored_bytes,
        "outcome": found.outcome.value,
    }
    if found.detail:
        shown["detail"] = found.detail
    if found.header is not None:
        members = msgspec.structs.asdict(found.header)
        shown |= {name: value.hex() if isinstance(value, bytes) else value for name, value in members.items()}
    return shown


def _print(line: Any) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
