"""Where the configuration says that everybody is."""

from __future__ import annotations

import pytest

from kvrelay.core.model.place import Hop, hop_between
from kvrelay.edge.system.config import load_config, router_settings
from kvrelay.edge.system.places import place_of_worker


@pytest.mark.covers("RT-18")
@pytest.mark.parametrize(
    ("worker", "hop"),
    [
        ({"url": "http://127.0.0.1:1"}, Hop.HOST),
        ({"url": "http://[::1]:1", "zone": "z9"}, Hop.HOST),
        ({"url": "http://localhost:1"}, Hop.HOST),
        ({"url": "http://10.0.0.7:1", "zone": "z1", "rack": "r1"}, Hop.RACK),
        ({"url": "http://10.0.0.7:1", "zone": "z1", "rack": "r2"}, Hop.ZONE),
        ({"url": "http://gpu-7:1", "zone": "z2", "rack": "r1"}, Hop.BEYOND),
        ({"url": "http://gpu-7:1", "rack": "r1"}, Hop.UNKNOWN),
    ],
)
def test_how_far_a_worker_is(worker: dict[str, str], hop: Hop) -> None:
    flags = {"gateway.zone": "z1", "gateway.rack": "r1", "policy.hops.zone_ms": 3.0, "workers": [worker]}
    config = load_config(env={}, flags=flags)
    settings = router_settings(config, key_seed=b"", manifest_digest=None)
    assert hop_between(settings.place, place_of_worker(config.workers[0])) is hop
    assert settings.hops.of(Hop.ZONE) == 3.0
