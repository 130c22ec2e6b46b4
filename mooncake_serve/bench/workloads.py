"""What the load generator sends: sessions of turns, made from a seed. Pure.

    shared-doc   many questions about few documents, in random order
    multi-turn   conversations that grow; each turn carries all before it
    trace        requests of a trace in the Mooncake format, at its times

A session is a list of turns that follow one another; sessions are independent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake_serve.errors import ConfigError

VOCABULARY_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so up said what its about than into them can only other time new some"
)
WORDS = VOCABULARY_TEXT.split()
TRACE_BLOCK_TOKENS = 512
VOCABULARY = 32_000
"""Token ids of traces are drawn from below this; most models have more."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is added to the conversation, or a whole prompt as token ids."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another, from `arrival_s` on where arrivals are given."""

    turns: tuple[Turn, ...]
    arrival_s: float = 0.0


def prose(words: int, seed: int) -> str:
    """Words that nobody wrote before; about 1.1 tokens each."""
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


def shared_doc(
    documents: int, questions: int, document_words: int, max_tokens: int, seed: int
) -> list[Session]:
    """`questions` about each document, all in random order."""
    dice = random.Random(seed)
    texts = [
        f"Document {dice.random()}\n{prose(document_words, seed + n)}" for n in range(documents)
    ]
    sessions = [
        Session(
            (Turn(f"{text}\n\nQuestion {number}: {prose(12, seed + number)}?", (), max_tokens),)
        )
        for text in texts
        for number in range(questions)
    ]
    dice.shuffle(sessions)
    return sessions


def multi_turn(
    conversations: int, turns: int, turn_words: int, max_tokens: int, seed: int
) -> list[Session]:
    """Conversations of `turns` turns; the first is ten times as long as the others."""

    def text(number: int, turn: int) -> str:
        words = turn_words * (1 if turn else 10)
        return f"{number}/{turn} {prose(words, seed + 1000 * number + turn)}"

    return [
        Session(tuple(Turn(text(number, turn), (), max_tokens) for turn in range(turns)))
        for number in range(conversations)
    ]


def trace(path: Path, requests: int, max_context: int, scale: float) -> list[Session]:
    """The first requests of a trace. Lengths are multiplied by `scale`, then cut to the context;
    blocks that were shared stay shared. Raises ConfigError."""
    sessions = []
    for number, line in enumerate(_lines(path)[:requests], 1):
        try:
            row = json.loads(line)
            blocks, asked = list(row["hash_ids"]), int(row["output_length"])
            length, arrival_s = int(row["input_length"]), row["timestamp"] / 1000
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError("", f"{path}:{number}: not a request in the Mooncake format") from err
        answer = max(1, min(int(asked * scale), max_context // 4))
        room = max_context - answer
        block_tokens = max(1, round(TRACE_BLOCK_TOKENS * scale))
        prompt = [token for block in blocks for token in _block(block, block_tokens)]
        prompt = prompt[: max(1, min(round(length * scale), room))]
        sessions.append(Session((Turn("", tuple(prompt), answer),), arrival_s))
    return sessions


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError as err:
        raise ConfigError("", f"{path}: {err.strerror}") from err


def _block(number: int, tokens: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(100, VOCABULARY) for _ in range(tokens)]


def poisson(sessions: Sequence[Session], rate: float, seed: int) -> list[Session]:
    """The sessions with random arrivals, `rate` a second on average."""
    dice, now, timed = random.Random(seed), 0.0, []
    for session in sessions:
        timed.append(replace(session, arrival_s=now))
        now += dice.expovariate(rate)
    return timed
