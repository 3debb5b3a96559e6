"""The compatibility contract: complete or refused, and every field counts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.contract.digest import encode_fields
from kvrelay.core.contract.fields import Contract, ContractError

GIVEN = {name: f"value of {name}" for name in Contract.__struct_fields__} | {"block_size": 16}


def contract(**changes):
    return Contract.from_mapping({**GIVEN, **changes}, source="a test")


@pytest.mark.parametrize("name", Contract.__struct_fields__)
def test_each_field_alone_changes_the_digest_and_is_named(name):
    changed = contract(**{name: 32 if name == "block_size" else "something else"})
    assert changed.digest() != contract().digest()
    assert contract().differing_fields(changed) == (name,)


@pytest.mark.parametrize("name", Contract.__struct_fields__)
def test_a_missing_field_is_an_error_and_not_a_default(name):
    incomplete = {key: value for key, value in GIVEN.items() if key != name}
    with pytest.raises(ContractError, match=f"missing: `{name}`"):
        Contract.from_mapping(incomplete, source="a test")


def test_all_faults_are_named_at_once_with_the_nearest_legal_name():
    with pytest.raises(ContractError) as caught:
        Contract.from_mapping(GIVEN | {"kv_dtype": 3, "rope_confg": "x", "block_size": True}, source="worker a")
    assert str(caught.value) == (
        "incomplete compatibility contract (from worker a)\n"
        "  unknown: `rope_confg` (did you mean `rope_config`?)\n"
        "  `kv_dtype` is 3: it must be text\n"
        "  `block_size` is True: it must be a whole number"
    )


def test_equal_contracts_have_equal_digests_after_a_round_trip():
    there_and_back = msgspec.msgpack.decode(msgspec.msgpack.encode(contract()), type=Contract)
    assert there_and_back == contract() and there_and_back.digest() == contract().digest()


fields = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=4)


@given(fields, fields)
def test_different_tagged_values_never_encode_alike(a, b):
    assert (encode_fields(a) == encode_fields(b)) == (a == b)
