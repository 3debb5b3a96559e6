"""A real Prometheus that scrapes one gateway, and what it answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.edge.system.ports import spare_port

SCRAPE_S = 1


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples now, without those that are no number. Raises HTTPError for what is no PromQL."""
        answer = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return [one for one in answer["data"]["result"] if one["value"][1] not in ("NaN", "+Inf", "-Inf")]

    def value(self, expression: str) -> float:
        (sample,) = self.query(expression)
        return float(sample["value"][1])

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        now = time.time()
        asked = {"query": expression, "start": now - 3600, "end": now + 60}
        return self._get(f"/api/v1/query_exemplars?{urllib.parse.urlencode(asked)}")["data"]

    def problems(self) -> list[str]:
        """Of the last scrape, and of the rules."""
        targets = self._get("/api/v1/targets")["data"]["activeTargets"]
        groups = self._get("/api/v1/rules")["data"]["groups"]
        return [one["lastError"] for one in targets if one["lastError"]] + [
            rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")
        ]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


@contextmanager
def scraping(urls: Sequence[str], folder: Path, rules: str) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.fail("no `prometheus` here: `make prometheus` installs the Debian package", pytrace=False)
    (folder / "kvrelay.rules.yml").write_text(rules)
    targets = [url.partition("://")[2] for url in urls]
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"},
        "rule_files": ["kvrelay.rules.yml"],
        "scrape_configs": [{"job_name": "kvrelay", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = spare_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", "--enable-feature=exemplar-storage"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 20
        while not server.ready():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)
