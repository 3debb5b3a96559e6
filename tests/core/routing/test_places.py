"""Where workers are: of equally good ones the nearer is taken, and the receipt says how far each was."""

from __future__ import annotations

import pytest

from kvrelay.core.model.events import SettingsChanged
from kvrelay.core.model.place import Hop, HopCosts, Place, hop_between
from kvrelay.core.routing.settings import RouterSettings
from tests.core.routing.rig import Rig, text

HERE = Place("gw", rack="r1", zone="z1")
PLACES = {
    Hop.HOST: Place("gw"),
    Hop.RACK: Place("w", rack="r1", zone="z1"),
    Hop.ZONE: Place("w", rack="r2", zone="z1"),
    Hop.BEYOND: Place("w", rack="r1", zone="z2"),
    Hop.UNKNOWN: Place("w"),
}
WARM = text(1, blocks=8)


@pytest.mark.parametrize(("hop", "there"), PLACES.items())
def test_how_far_somebody_is(hop, there):
    assert hop_between(HERE, there) is hop


def test_a_zone_that_nobody_stated_is_not_the_same_one():
    assert hop_between(Place(), Place()) is Hop.UNKNOWN
    assert hop_between(Place(zone="z"), Place()) is hop_between(Place(), Place(zone="z")) is Hop.UNKNOWN


def _rig(*hops: Hop, copies: int = 1, **settings) -> Rig:
    rig = Rig(policy="cache_load", place=HERE, **settings)
    for hop in hops:
        for copy in range(copies):
            rig.join(f"{hop.value}{copy}", place=PLACES[hop])
    return rig


@pytest.mark.covers("RT-18")
@pytest.mark.parametrize("scorer", ["predict", "weights"])
@pytest.mark.parametrize("copies", [1, 9], ids=["few", "many"])
def test_with_the_same_overlap_the_nearer_worker_wins_whoever_drew_what(scorer, copies):
    far_to_near = (Hop.BEYOND, Hop.ZONE, Hop.RACK)
    rig = _rig(*far_to_near, copies=copies, scorer=scorer)
    for hop in far_to_near:
        for copy in range(copies):
            rig.hold(f"{hop.value}{copy}", WARM)
    for draw in range(12):
        rig.arrive(WARM, draw=draw)
        receipt = rig.finish(cached=128)
        assert receipt.chosen_worker.startswith("rack")
        assert receipt.candidates[0].hop is Hop.RACK
        assert copies > 1 or {candidate.hop for candidate in receipt.candidates} == {Hop.RACK, Hop.ZONE, Hop.BEYOND}


@pytest.mark.covers("RT-18")
def test_a_deeper_match_is_worth_a_longer_way_and_the_terms_say_so():
    rig = _rig(Hop.RACK, Hop.BEYOND, initial_prefill_tokens_per_s=1_000.0)
    deep = text(1, blocks=40)
    rig.hold("beyond0", deep)
    assert rig.ask(deep) == "beyond0", "640 tokens take longer than the way"
    receipt = rig.finish(cached=640)
    terms = {candidate.worker: candidate.terms for candidate in receipt.candidates}
    assert (terms["beyond0"]["transfer_ms"], terms["rack0"]["transfer_ms"]) == (20.0, 0.1)
    assert rig.ask(text(2)) == "rack0"


def test_what_a_way_costs_can_be_said_anew():
    rig = _rig(Hop.ZONE, Hop.BEYOND)
    assert rig.ask(text(3)) == "zone0"
    rig.finish()
    moved = {"place": Place("gw", zone="z2"), "hops": HopCosts(zone_ms=2.0)}
    rig.step(SettingsChanged(RouterSettings(key_seed=b"rig", policy="cache_load", **moved)))
    assert rig.ask(text(4)) == "beyond0", "the gateway says that it is in the other zone"
    assert rig.finish().candidates[0].terms["transfer_ms"] == 2.0


def test_where_nobody_says_anything_nothing_is_added():
    rig = Rig(policy="cache_load")
    rig.join("a", "b")
    rig.ask(text(1))
    for candidate in rig.finish().candidates:
        assert candidate.hop is Hop.UNKNOWN and candidate.terms["transfer_ms"] == 0.0
