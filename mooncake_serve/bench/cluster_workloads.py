"""The two workloads of `bench cluster`, as token ids from a seed.

`multi_turn`: conversations whose every turn is the whole history and something new; the answers in
the history are part of the script, so that every arm is asked the same. `shared_document`:
questions on documents, the documents taking turns. Requests of one thread (a conversation, or a
document) follow each other; threads interleave.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One request: it waits for the ones before it in its thread."""

    thread: int
    prompt: list[int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long and how many."""

    threads: int
    rounds: int
    document_tokens: int
    first_turn_tokens: int
    turn_tokens: int
    question_tokens: int
    pool: str
    """Each replica's own pool of KV."""
    dram: str
    """Each node's store."""
    vocabulary: range = range(1000, 30_000)
    """Ordinary tokens of the embedded model."""


FULL = Sizes(6, 6, 768, 768, 64, 32, "64MiB", "64MiB")
"""What is asked for again fits the stores of both nodes together, and not those of one."""
QUICK = Sizes(4, 4, 1024, 520, 256, 40, "384MiB", "1GiB")
TINY = Sizes(4, 4, 700, 400, 160, 16, "384MiB", "1GiB", range(10, 300))


def multi_turn(sizes: Sizes, seed: int) -> list[Job]:
    """Turn by turn, each conversation once per round."""
    drawn = random.Random(f"turns {seed}")
    history: dict[int, list[int]] = {thread: [] for thread in range(sizes.threads)}
    jobs = []
    for turn in range(sizes.rounds):
        for thread in range(sizes.threads):
            length = sizes.turn_tokens if turn else sizes.first_turn_tokens
            history[thread] += _tokens(drawn, length, sizes)
            jobs.append(Job(thread, list(history[thread])))
    return jobs


def shared_document(sizes: Sizes, seed: int) -> list[Job]:
    """Question by question, each document once per round."""
    drawn = random.Random(f"documents {seed}")
    documents = [_tokens(drawn, sizes.document_tokens, sizes) for _ in range(sizes.threads)]
    return [
        Job(thread, document + _tokens(drawn, sizes.question_tokens, sizes))
        for _ in range(sizes.rounds)
        for thread, document in enumerate(documents)
    ]


WORKLOADS = {"multi_turn": multi_turn, "shared_document": shared_document}


def _tokens(drawn: random.Random, count: int, sizes: Sizes) -> list[int]:
    return drawn.choices(sizes.vocabulary, k=count)
