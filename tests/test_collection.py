"""The cyclic collector is as it was before, whatever happens in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import kinds
import planned
import pytest

from tpshard.collection import uncollected
from tpshard.errors import DamagedError, LayoutError
from tpshard.layout import whole_layout
from tpshard.manifestreader import parsed
from tpshard.place import place_native
from tpshard.planning import build_plan


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_is_off_inside_and_as_before_behind(enabled: bool) -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled
    with pytest.raises(ZeroDivisionError), uncollected():
        _ = 1 / 0
    assert gc.isenabled() == enabled


def test_planning_leaves_it_as_it_was(enabled: bool) -> None:
    layout = planned.native(kinds.BYTES, 3)
    whole = whole_layout(layout.tensors.values())
    build_plan(place_native(whole).placed, place_native(layout).placed)
    assert gc.isenabled() == enabled
    other = planned.native({"x": kinds.CUT["norm"]}, 3)
    with pytest.raises(LayoutError):
        build_plan(place_native(whole).placed, place_native(other).placed)
    assert gc.isenabled() == enabled
    with pytest.raises(DamagedError):
        parsed(b"{}", "tpshard.json")
    assert gc.isenabled() == enabled
