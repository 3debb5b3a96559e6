"""One worker, one spelling."""

from __future__ import annotations

import pytest

from kvrelay.edge.system.urls import (
    BadUrl,
    canonical_worker_url,
    host_and_port,
    join_url,
    mask_credentials,
    name_from_url,
)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("HTTP://GPU-1.Example:80/v1/", "http://gpu-1.example"),
        ("https://host:443/v1", "https://host"),
        ("https://host:80", "https://host:80"),
        ("http://host/llm//a/v1", "http://host/llm/a"),
        ("http://host/llm/", "http://host/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://[2001:DB8:0:0::1]", "http://[2001:db8::1]"),
        ("host:8000", "http://host:8000"),
        (" 127.0.0.1:8000 ", "http://127.0.0.1:8000"),
        ("http://host.", "http://host"),
    ],
)
def test_spellings_of_one_worker_are_equal(written: str, canonical: str) -> None:
    assert canonical_worker_url(written) == canonical
    assert canonical_worker_url(canonical) == canonical


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("ftp://host", "http:// or https://"),
        ("http://", "names a host"),
        ("http://user:pw@host", "api_key_file"),
        ("http://host/?a=b", "no query"),
        ("http://host/#x", "no fragment"),
        ("http://host:0", "1 to 65535"),
        ("http://host:99999", "1 to 65535"),
        ("http://host:eighty", "1 to 65535"),
        ("http://ho st", "a name or an address"),
        ("http://[::g]:80", "in brackets"),
    ],
)
def test_what_is_no_worker_url_says_what_would_be(written: str, why: str) -> None:
    with pytest.raises(BadUrl, match=why):
        canonical_worker_url(written)


def test_v1_is_not_added_twice() -> None:
    assert join_url(canonical_worker_url("http://host:8000/v1"), "/v1/models") == "http://host:8000/v1/models"


def test_address_and_name_of_a_worker() -> None:
    assert host_and_port("http://[::1]:8000/llm") == ("::1", 8000)
    assert host_and_port("https://host") == ("host", 443)
    assert name_from_url("http://host:8000/llm/a") == "host:8000-llm-a"


def test_credentials_are_masked() -> None:
    assert mask_credentials("valkey://:pw@host:6379/0") == "valkey://***@host:6379/0"
    assert mask_credentials("s3://b/p?endpoint=http://u:k@h&secret=x") == "s3://b/p?endpoint=***&secret=***"
