"""A workload of conversations about documents: who asks what, in which order.

Each session asks about one document, turn after turn; each turn's prompt is everything before it,
the answers included, plus a new question. Sessions take turns in an order that the seed fixes.
Documents are text that every Python carries, prose and code, so that their KV is that of text.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

SOURCES = ("argparse", "difflib", "tarfile", "subprocess", "zipfile", "logging", "inspect", "ast")
REPLICAS = 2


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    documents: int = 8
    sessions: int = 6
    """Of each document."""
    turns: int = 4
    document_tokens: int = 512
    question_tokens: int = 16
    answer_tokens: int = 4


@dataclass
class Session:
    """One conversation, which grows."""

    number: int
    prompt: list[int]
    questions: list[list[int]]
    replicas: list[int]
    """Where a balancer that knows nothing sends each turn."""
    answers: list[list[int]] = field(default_factory=list)

    def ask(self) -> list[int]:
        """The next turn's prompt."""
        self.prompt += self.questions[len(self.answers)]
        return list(self.prompt)

    def hear(self, answer: list[int]) -> None:
        """What was answered becomes part of the conversation."""
        self.answers.append(answer)
        self.prompt += answer


class Workload:
    """The same requests at every start; iterate once."""

    def __init__(self, size: Size, tokenizer: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._size = size
        documents = [self._document(tokenizer, number) for number in range(size.documents)]
        questions = tokenizer.encode(_prose()[200_000:400_000])
        self.sessions = []
        for number in range(size.documents * size.sessions):
            starts = [self._random.randrange(20_000) for _ in range(size.turns)]
            asked = [questions[start : start + size.question_tokens] for start in starts]
            replicas = [self._random.randrange(REPLICAS) for _ in range(size.turns)]
            document = documents[number % size.documents]
            self.sessions.append(Session(number, list(document), asked, replicas))

    def __iter__(self) -> Iterator[tuple[Session, int]]:
        """Sessions with the number of their turn, in the order in which they ask."""
        for turn in range(self._size.turns):
            order = list(self.sessions)
            self._random.shuffle(order)
            for session in order:
                yield session, turn

    def _document(self, tokenizer: Any, number: int) -> list[int]:
        if number % 2:
            source = SOURCES[number // 2 % len(SOURCES)]
            text = inspect.getsource(import_module(source))
        else:
            text = _prose()[number * 10_000 :]
        tokens = tokenizer.encode(text[: 12 * self._size.document_tokens])
        if len(tokens) < self._size.document_tokens:
            raise ValueError(f"document {number} has only {len(tokens)} tokens")
        return tokens[: self._size.document_tokens]


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics.values())
