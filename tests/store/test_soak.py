"""Two minutes of mixed load with random kills; `make soak` takes half an hour."""

from __future__ import annotations

import pytest

from tests.store import soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_leaks_and_no_byte_is_wrong(seed: int) -> None:
    done = soak.run(120.0, seed)
    assert min(done["workers_killed"], done["blocks_checked"]) > 10, done
