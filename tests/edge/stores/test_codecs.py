"""Codecs: what goes in comes out, exactly or within the stated bound; damage is an error and never other bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.edge.stores.codecs import (
    CODECS,
    ELEMENT_BYTES,
    FP8_ABSOLUTE_ERROR_OF_MAX,
    FP8_GROUP,
    FP8_RELATIVE_ERROR,
    CodecError,
    codec,
)


def round_trip(name: str, payload: bytes, dtype: str) -> bytes:
    packed = codec(name).encode(memoryview(payload), dtype)
    into = bytearray(len(payload))
    codec(name).decode(memoryview(packed), dtype, memoryview(into))
    return bytes(into)


@pytest.mark.covers("TR-15")
@pytest.mark.parametrize("name", [name for name, one in CODECS.items() if not one.lossy])
@given(payload=st.binary(min_size=1, max_size=600), dtype=st.sampled_from(sorted(ELEMENT_BYTES)))
@settings(max_examples=40, deadline=None)
def test_lossless_ones_give_back_every_byte(name: str, payload: bytes, dtype: str) -> None:
    assert round_trip(name, payload, dtype) == payload


def bfloat16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def from_bfloat16(payload: bytes) -> np.ndarray:
    return (np.frombuffer(payload, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


@pytest.mark.covers("TR-15")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", range(8))
def test_fp8_stays_within_its_stated_bound(dtype: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    values = chance.normal(size=1000) * 10.0 ** chance.uniform(-4, 3, size=1000)
    values[:3] = (0.0, -0.0, values[3])
    if dtype == "bfloat16":
        payload, rounding = bfloat16(values), 2.0**-8
        before = from_bfloat16(payload)
        after = from_bfloat16(round_trip("fp8", payload, dtype))
    else:
        rounding = 2.0**-11 if dtype == "float16" else 2.0**-23
        payload = values.astype(dtype).tobytes()
        before = np.frombuffer(payload, dtype=dtype).astype(np.float32)
        after = np.frombuffer(round_trip("fp8", payload, dtype), dtype=dtype).astype(np.float32)
    largest = np.repeat([np.abs(before[at : at + FP8_GROUP]).max() for at in range(0, 1000, FP8_GROUP)], FP8_GROUP)
    bound = np.maximum(np.abs(before) * FP8_RELATIVE_ERROR, largest[:1000] * FP8_ABSOLUTE_ERROR_OF_MAX)
    smallest = 2.0**-24 if dtype == "float16" else 0.0  # its own subnormal step
    assert (np.abs(after - before) <= bound * 1.0001 + np.abs(after) * rounding + smallest).all()


def test_fp8_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(CodecError, match="not finite"):
        codec("fp8").encode(memoryview(np.array([1.0, np.inf], dtype=np.float32).tobytes()), "float32")
    with pytest.raises(CodecError, match="not int8"):
        codec("fp8").encode(memoryview(b"xx"), "int8")


@pytest.mark.parametrize("name", sorted(CODECS))
@given(packed=st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_garbage_is_an_error_or_fills_the_destination(name: str, packed: bytes) -> None:
    into = bytearray(64)
    try:
        codec(name).decode(memoryview(packed), "float16", memoryview(into))
    except CodecError:
        return
    assert len(into) == 64


def test_a_frame_that_claims_to_be_huge_gets_no_memory() -> None:
    packed = codec("zstd").encode(memoryview(bytes(50_000_000)), "uint8")
    with pytest.raises(CodecError, match="content size"):
        codec("zstd").decode(memoryview(packed), "uint8", memoryview(bytearray(64)))
