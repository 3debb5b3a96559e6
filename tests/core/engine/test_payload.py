"""Payloads are chained, separate namespaces, and are not the look-up hash."""

from __future__ import annotations

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.engine.payload import PAYLOAD_BYTES, PayloadModel
from tests.core.engine.engines import BLOCK, tokens


def test_roots_are_tagged_by_kind() -> None:
    model = PayloadModel("m")
    roots = [
        model.root(adapter=None, salt=None),
        model.root(adapter="x", salt=None),
        model.root(adapter=None, salt="x"),
        model.root(adapter="x", salt="x"),
        PayloadModel("n").root(adapter=None, salt=None),
        PayloadModel("madapterx").root(adapter=None, salt=None),
    ]
    assert len(set(roots)) == len(roots)


def test_a_block_depends_on_parent_tokens_and_taint() -> None:
    model = PayloadModel("m")
    root = model.root(adapter=None, salt=None)
    payloads = {
        model.block(root, b"abcd"),
        model.block(root, b"abce"),
        model.block(model.block(root, b"abcd"), b"abcd"),
        model.block(root, b"abcd", model.read_wrong(b"", root, 0)),
    }
    assert len(payloads) == 4
    assert all(len(payload) == PAYLOAD_BYTES for payload in payloads)


def test_payloads_do_not_follow_from_look_up_hashes() -> None:
    name = int(Keyer(b"0").prompt_keys(tokens(BLOCK), BLOCK)[0])
    model = PayloadModel("m")
    payload = model.block(model.root(adapter=None, salt=None), tokens(BLOCK).tobytes())
    assert name.to_bytes(8, "big") not in payload and name.to_bytes(8, "little") not in payload


def test_the_next_token_reads_payload_tail_position_and_variant() -> None:
    model = PayloadModel("m")
    cases = [
        (b"payload", b"", b"tail", 1, 0),
        (b"other", b"", b"tail", 1, 0),
        (b"payload", b"taint", b"tail", 1, 0),
        (b"payload", b"", b"liat", 1, 0),
        (b"payload", b"", b"tail", 2, 0),
        (b"payload", b"", b"tail", 1, 1),
    ]
    texts = {
        bytes(
            model.next_token(payload, taint, tail + bytes([i]), position=position, variant=variant) for i in range(16)
        )
        for payload, taint, tail, position, variant in cases
    }
    assert len(texts) == len(cases)
    assert all(text.decode("ascii").replace(" ", "a").islower() for text in texts)
