"""What `kvrelay store` says."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.edge.stores.audit import Inspected, PurgeRecord
from kvrelay.edge.stores.backends import Backend, Tried
from kvrelay.edge.stores.contracts import OtherContract
from kvrelay.edge.stores.store import StoreStats

NOT_LOOPBACK = (
    "error: a store that other machines can reach needs TLS and a token\n"
    "  legal: --tls-cert and --tls-key and --token-file, or --insecure to do without, or a loopback --host"
)
INSECURE = "warning: anybody who can reach this port can read, write and delete what is stored (--insecure)"
PURGE_WHAT = (
    "error: `kvrelay store purge` was not told what to delete\n"
    "  legal: --tenant TAG, --epoch-below N, --contract DIGEST, or --all"
)


def unavailable(url: str, reason: str) -> str:
    return f"error: the store {url} did not do what was asked: {reason}\n  hint: is it running, and is the URL right?"


def backend(one: Backend, missing: str | None) -> str:
    state = "available" if missing is None else f"not available: {missing}"
    return f"{one.url:<32} {one.medium.value:<7} {one.scope.value:<11} {state}\n    {one.what}"


def tried(url: str, one: Tried) -> str:
    if one.problem is not None:
        return f"{url}  does not work: {one.problem}"
    return f"{url}  works: written in {one.write_ms:.1f} ms, read in {one.read_ms:.1f} ms"


def serving(url: str, kind: str) -> str:
    return f"serving a {kind} store at {url}"


def object_line(found: Inspected) -> str:
    header = found.header
    if header is None:
        return f"{found.name.hex()[:24]}  {found.stored_bytes:>10}  {found.outcome.value}: {found.detail}"
    state = "" if found.outcome == "hit" else f"  {found.outcome.value}: {found.detail}"
    return (
        f"{found.name.hex()[:24]}  {found.stored_bytes:>10}  tenant {header.tenant_tag.hex()}  epoch {header.epoch}  "
        f"tokens {header.start_token}-{header.end_token}  {header.dtype}  {header.role}  {header.codec}  "
        f"{header.cipher}{f' ({header.key_id})' if header.key_id else ''}{state}"
    )


def verified(counts: Mapping[str, int], stored_bytes: int) -> str:
    sound = counts.get("hit", 0)
    rest = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "hit")
    return f"{sum(counts.values())} objects, {stored_bytes} bytes: {sound} sound" + (f", {rest}" if rest else "")


def other_contract(other: OtherContract, objects: int) -> str:
    fields = "; ".join(f"`{name}`: {stored!r} there, {mine!r} here" for name, (stored, mine) in other.differs.items())
    return f"{objects} objects are of another contract ({other.digest.hex()[:12]}), which differs in {fields}"


def same_contract(objects: int) -> str:
    return f"{objects} objects are of this contract"


def purged(record: PurgeRecord) -> str:
    left = f"; {record.left} are still listed" if record.left else ""
    return f"deleted {record.objects} objects ({record.what}) from {record.store}{left}"


def stats(url: str, found: StoreStats) -> str:
    def shown(value: int | None) -> str:
        return "unavailable" if value is None else str(value)

    lines = [f"{url}", f"  objects   {shown(found.objects)}", f"  bytes     {shown(found.used_bytes)}"]
    lines.append(f"  limit     {'none' if found.capacity_bytes is None else found.capacity_bytes}")
    lines += [f"  {name:<9} {value}" for name, value in found.detail.items()]
    return "\n".join(lines)


def scrubbed(found: Inspected) -> str:
    return f"deleted {found.name.hex()[:24]}: {found.outcome.value}{f', {found.detail}' if found.detail else ''}"
