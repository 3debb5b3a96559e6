"""A real vLLM server with our KV connector, and questions to it: completions, resets, what it loaded."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.real.beside_vllm import python_path
from tests.real.engine import MODEL_NAME, Engine, VllmWorker

CHUNK_TOKENS = 64


class Answered:
    """One completion: what came, and what the connector said of it."""

    def __init__(self, body: dict[str, Any], seconds: float) -> None:
        choice = body["choices"][0]
        self.token_ids: list[int] = choice["token_ids"]
        self.logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        self.top: list[dict[str, float]] = choice["logprobs"]["top_logprobs"]
        self.cached_tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.kv: dict[str, Any] = body["kv_transfer_params"]["kvrelay"]
        self.seconds = seconds

    @property
    def exact(self) -> tuple[Any, ...]:
        """Everything that must not differ by a bit."""
        return self.token_ids, self.logprobs, self.top


class KvWorker(VllmWorker):
    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        port: int,
        report_port: int,
        cpu: int,
        folder: Path,
        connector: Mapping[str, Any],
        adapters: Mapping[str, Path],
        environment: Mapping[str, str],
        load_failure_policy: str = "recompute",
    ) -> None:
        super().__init__(engine, name, port=port, cpu=cpu, folder=folder)
        self.report = f"http://127.0.0.1:{report_port}"
        self._connector = {**connector, "report": f"127.0.0.1:{report_port}"}
        self._adapters = adapters
        self._more_environment = environment
        self._load_failure_policy = load_failure_policy

    def more_arguments(self) -> tuple[str, ...]:
        transfer = {
            "kv_connector": "KvrelayConnector",
            "kv_connector_module_path": "kvrelay.edge.connectors.vllm.kv.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": self._load_failure_policy,
            "kv_connector_extra_config": self._connector,
        }
        arguments = ["--kv-transfer-config", json.dumps(transfer)]
        if self._adapters:
            modules = [f"{name}={folder}" for name, folder in self._adapters.items()]
            arguments += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules]
        return tuple(arguments)

    def _environment(self) -> dict[str, str]:
        path = {"PYTHONPATH": python_path(self._engine), "VLLM_SERVER_DEV_MODE": "1"}
        return super()._environment() | path | self._more_environment

    def complete(self, prompt: list[int], **more: Any) -> Answered:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 3,
            "return_token_ids": True,
            **more,
        }
        began = time.monotonic()
        return Answered(self._post("/v1/completions", body), time.monotonic() - began)

    def first_token_s(self, prompt: list[int]) -> float:
        """Until a completion of one token is there."""
        return self.complete(prompt, max_tokens=1).seconds

    def forget(self) -> None:
        """Empties the engine's own cache, and only that."""
        assert self._post("/reset_prefix_cache", {}) == {"success": True}

    def stats(self) -> dict[str, int]:
        return self._get(f"{self.report}/stats")

    def contract(self) -> dict[str, Any]:
        return self._get(f"{self.report}/contract")

    def settings(self) -> dict[str, Any]:
        return self._get(f"{self.report}/settings")

    def wait_until_sharing(self) -> None:
        """Until its contract is formed and compared with those in the store."""
        wait_for(lambda: self.contract()["contract"] is not None)

    def wait_until_saved(self, chunks: int) -> None:
        """Until so many chunks were stored since the start."""
        wait_for(lambda: self.stats().get("saves_stored", 0) >= chunks)

    def counters(self) -> dict[str, float]:
        """Ours on the engine's metrics page, without its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            page = response.read().decode()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^vllm:kvrelay_kv_(\w+)_total\{(.*?)\} (\S+)$", page, re.M):
            outcome = re.search(r'outcome="(\w+)"', labels)
            found[name if outcome is None else f"{name}_{outcome[1]}"] = float(value)
        return found

    def _get(self, url: str) -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)  # type: ignore[no-any-return]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return json.load(response)  # type: ignore[no-any-return]
        except urllib.error.HTTPError as fault:
            raise AssertionError(f"{path} answered {fault.code}: {fault.read()[:500]!r}") from fault


def wait_for(condition: Any, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come about")
        time.sleep(0.05)
