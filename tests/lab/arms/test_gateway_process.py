from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.lab.arms.gateway_process import GatewayProcess, GatewayStartError


async def test_gateway_that_cannot_start_says_why_and_is_gone(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("[gateway]\nprot = 0\n")
    gateway = GatewayProcess(config, log=tmp_path / "gateway.log", ready_timeout_s=20.0)

    with pytest.raises(GatewayStartError, match=r"did not say(.|\n)*gateway\.prot(.|\n)*port"):
        await gateway.__aenter__()

    assert gateway._process is not None and gateway._process.returncode == 2


async def test_worker_that_never_comes_is_named(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("[gateway]\nport = 0\nadmin_port = 0\n")
    async with GatewayProcess(config, log=tmp_path / "gateway.log", ready_timeout_s=60.0) as gateway:
        with pytest.raises(GatewayStartError, match="not all of mock-7 became usable"):
            await gateway.wait_for_workers(["mock-7"], timeout_s=2.0)
