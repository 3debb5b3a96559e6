"""The compatibility contract: everything that must be equal before one worker may use KV that another one computed.

A field that is not known is an error, never a default: two sides that both "do not know" their rope configuration would
otherwise agree.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from msgspec import Struct, structs

from kvrelay.core.contract.digest import keyed_digest


class ContractError(ValueError):
    """The contract as given cannot be used; the message names each field at fault."""


class Contract(Struct, frozen=True, kw_only=True):
    """One value per thing that changes the bytes or the meaning of a KV block. All are required."""

    model_revision: str
    weight_quantization: str
    tokenizer_hash: str
    chat_template_version: str
    attention_backend: str
    kv_dtype: str
    block_size: int  # tokens
    layer_layout: str
    kernel_layout: str  # inner order of a block, for instance AMX tiles against plain vectors
    parallel_geometry: str
    rope_config: str
    lora_id: str  # "" states: no adapter
    multimodal_hash: str  # "" states: text only
    tenant_namespace: str
    engine_build: str
    hash_algorithm: str

    @classmethod
    def from_mapping(cls, given: Mapping[str, object], *, source: str) -> Contract:
        """Build a contract from outside data; ContractError names every missing, unknown or mistyped field at once."""
        faults = [f"  missing: `{name}`" for name in cls.__struct_fields__ if given.get(name) is None]
        faults += [f"  unknown: `{name}`{_hint(name)}" for name in given if name not in cls.__struct_fields__]
        for name in cls.__struct_fields__:
            value, wanted = given.get(name), int if name == "block_size" else str
            if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
                faults.append(f"  `{name}` is {value!r}: it must be {'a whole number' if wanted is int else 'text'}")
        if faults:
            raise ContractError("\n".join([f"incomplete compatibility contract (from {source})", *faults]))
        return cls(**given)  # type: ignore[arg-type]

    def digest(self) -> bytes:
        """32 bytes; equal exactly when every field is equal."""
        return keyed_digest(b"", ((name, str(value).encode()) for name, value in structs.asdict(self).items()))

    def differing_fields(self, other: Contract) -> tuple[str, ...]:
        """Names of the fields in which the two contracts differ, in declaration order."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))


def _hint(name: str) -> str:
    nearest = difflib.get_close_matches(name, Contract.__struct_fields__, n=1)
    return f" (did you mean `{nearest[0]}`?)" if nearest else ""
