"""Run with the engine's own Python: a real vLLM in this process, with our connector over a directory.

No server and no second process: it starts in a fifth of the time. Results go to standard output as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import urllib.request
from typing import Any

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
)

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

CHUNK_TOKENS = 64
SAMPLING = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)


class InProcess:
    """One engine. Only one at a time."""

    def __init__(self, model: str, store: str, report_port: int, *, tenant: str = "default", **options: Any) -> None:
        connector = {
            "store": {"tiers": [{"url": f"file://{store}"}], "deadline_ms": 2000, "break_even": False},
            "chunk_tokens": options.pop("chunk_tokens", CHUNK_TOKENS),
            "report": f"127.0.0.1:{report_port}",
            "digest_cache": None,
            "tenant": tenant,
        }
        transfer = KVTransferConfig(
            kv_connector="KvrelayConnector",
            kv_connector_module_path="kvrelay.edge.connectors.vllm.kv.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=connector,
        )
        usual = {"dtype": "float32", "block_size": 32, "max_model_len": 2048, "max_num_seqs": 4, "enforce_eager": True}
        self._report = f"http://127.0.0.1:{report_port}"
        self.llm: Any = LLM(model=model, kv_transfer_config=transfer, **(usual | options))
        self.wait(lambda: self.ask("contract")["contract"] or self.ask("contract")["fault"])

    def ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self._report}/{what}", timeout=10) as response:
            return json.load(response)

    def generate(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        (answer,) = self.llm.generate({"prompt_token_ids": prompt}, SAMPLING, use_tqdm=False, **more)
        steps = answer.outputs[0].logprobs
        exact = [sorted((token, said.logprob) for token, said in step.items()) for step in steps]
        return {"tokens": list(answer.outputs[0].token_ids), "exact": exact, "kv": answer.kv_transfer_params["kvrelay"]}

    def wait_until_saved(self, chunks: int, prompt: list[int]) -> None:
        """This engine steps only when it is asked something, and hears of its saves then."""
        self.wait(lambda: self.ask("stats").get("saves_stored", 0) >= chunks or (bool(self.generate(prompt)) and False))

    def wait(self, condition: Any, within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("it did not come about")
            time.sleep(0.05)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        clean_up()


def clean_up() -> None:
    """What an engine leaves in its process, also one whose start failed: the next would take it for its own."""
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def say(result: object) -> None:
    """The last line of the output; the engine's own talk comes before."""
    sys.stdout.flush()
    sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
