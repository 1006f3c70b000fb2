"""Numbers that users give."""

import numpy as np
import pytest

from mp_lstm.data.checks import integer
from mp_lstm.errors import InputError


def test_takes_ints_and_numpy_ints():
    assert integer("seed", np.int32(0), 0) == 0
    assert type(integer("batch_size", np.int64(3))) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", None])
def test_says_what_was_got_and_wanted(value):
    with pytest.raises(InputError, match=rf"batch_size is {value!r}, wanted an integer of at least 1: pass e.g. 8"):
        integer("batch_size", value)
