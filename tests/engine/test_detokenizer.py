"""Incremental text equals the text of all tokens; stop strings are found wherever they fall."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mooncake_serve.engine.detokenizer import Detokenizer


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer of single bytes: characters spread over tokens."""
    return bytes(ids).decode("utf-8", errors="replace")


def run(text: str, stop: Sequence[str] = ()) -> tuple[str, bool, list[str]]:
    detokenizer = Detokenizer(decode_bytes, stop)
    pieces = []
    for byte in text.encode():
        pieces.append(detokenizer.push(byte))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return "".join(pieces), detokenizer.stopped, pieces


@given(st.text(max_size=40))
def test_pieces_add_up(text: str) -> None:
    assert run(text)[0] == text


@given(st.text(alphabet="abcä", max_size=30), st.lists(st.text("abcä", min_size=1, max_size=4)))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    got, stopped, _ = run(text, stop)
    # The earliest end decides: that is the token at which generation stopped.
    ends = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
    assert stopped == bool(ends)
    if ends:
        end = min(ends)[0]
        begin = min(start for stop_end, start in ends if stop_end == end)
        assert got == text[:begin]
    else:
        assert got == text


def test_a_possible_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(decode_bytes, ["END"])
    assert [detokenizer.push(byte) for byte in b"xEN"] == ["x", "", ""]
    assert detokenizer.push(ord("e")) == "ENe"
    assert detokenizer.push(ord("E")) == ""
    assert detokenizer.finish() == "E"


def test_half_a_character_is_held_back_and_bounded() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.push(byte) for byte in "€".encode()] == ["", "", "€"]
    garbage = [detokenizer.push(0xFF) for _ in range(20)]
    assert "".join(garbage)
