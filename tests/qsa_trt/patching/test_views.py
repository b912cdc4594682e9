"""Parts of heads that Slices take: the dims that NumPy's own slices of the same bounds leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qsa_trt.patching.views import _bound

FIRST, END = 16, 80  # a part of a head
WIDTH = END - FIRST


@given(st.integers(-WIDTH, WIDTH + 40), st.integers(-WIDTH, WIDTH + 40) | st.just((1 << 63) - 1))
def test_bounds_are_those_of_a_numpy_slice(start: int, stop: int) -> None:
    """Bounds count from the part's ends, and past its end they are its end."""
    kept = range(FIRST, END)[start:stop]
    first, end = _bound(start, FIRST, END), _bound(stop, FIRST, END)
    assert first is not None and end is not None
    assert range(first, max(first, end)) == kept or not kept


def test_a_bound_past_an_end_that_is_not_known_is_not_known() -> None:
    assert _bound(64, 0, None) == 64
    assert _bound((1 << 63) - 1, 0, None) is None
    assert _bound(-64, 0, None) is None
