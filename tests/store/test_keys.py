"""Block keys: the same bytes everywhere, and only equal for equal prefixes."""

from __future__ import annotations

import subprocess
import sys
from array import array

import pytest

from mooncake_serve.store import block_keys, tenant_salt

GOLDEN_SALT = "26607d86a44aca467d51a04873b594a48ebb10da79d4c848fd20b0993e1692f6"
GOLDEN_KEYS = [
    "059c201b263e5d0e66edd1ff9b6629f35ed23795d070f846f00e08757c0fe3ad",
    "d6cd8ab77c4fb4dd069ce1886aed0aa01b06f7d29cd8481aa30a32f2792f19c0",
]


def test_golden_vector_in_this_process_and_another() -> None:
    salt = tenant_salt(b"cluster", "acme")
    assert salt.hex() == GOLDEN_SALT
    assert [key.hex() for key in block_keys("model/bf16/256", salt, range(9), 4)] == GOLDEN_KEYS
    code = (
        "from mooncake_serve.store import block_keys, tenant_salt\n"
        "salt = tenant_salt(b'cluster', 'acme')\n"
        "print(*(key.hex() for key in block_keys('model/bf16/256', salt, range(9), 4)))"
    )
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert other.stdout.split() == GOLDEN_KEYS


def test_tokens_may_come_as_any_integers() -> None:
    tokens = [0, 1, 2**31 - 1, 7]
    want = block_keys("n", b"", tokens, 2)
    for code in "IiqlL":
        if array(code).itemsize == 8 and code == "L":
            continue
        assert block_keys("n", b"", array(code, tokens), 2) == want
    assert block_keys("n", b"", tuple(tokens), 2) == want


def test_tenants_never_share_keys() -> None:
    tokens = range(16)
    chains = [
        block_keys("n", salt, tokens, 4)
        for salt in (b"", tenant_salt(b"s", "a"), tenant_salt(b"s", "b"), tenant_salt(b"t", "a"))
    ]
    assert len({key for chain in chains for key in chain}) == 16


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "error"),
    [
        ([-1, 2], 2, ValueError),
        ([2**32, 2], 2, ValueError),
        (array("q", [-1, 2]), 2, ValueError),
        (array("d", [1.0]), 1, TypeError),
        ([1], 0, ValueError),
        (["a"], 1, ValueError),
    ],
)
def test_wrong_tokens_are_refused(
    tokens: list[int], block_tokens: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        block_keys("n", b"", tokens, block_tokens)
