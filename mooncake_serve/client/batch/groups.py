"""Which jobs share a prompt's beginning. Pure.

Jobs are sorted by their prompts' text, so that those with a common beginning are neighbours; a
group is a run of neighbours that share at least `SHARED_CHARS_MIN` characters. The first of a group
is its pilot: once it has run, the others find the shared KV computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARED_CHARS_MIN = 1024
"""About a KV block of 256 tokens: less than that is not kept."""


@dataclass(frozen=True, slots=True)
class Group:
    """Positions of jobs that share a beginning, in the caller's list; the first is the pilot."""

    members: tuple[int, ...]
    shared_chars: int


def prompt_text(body: Mapping[str, Any]) -> str:
    """A request body's prompt as one text, alike exactly as far as the token ids are."""
    if "messages" in body:
        turns = (message for message in body["messages"] if isinstance(message, Mapping))
        return "".join(
            f"\x00{turn.get('role')}\x01{_content(turn.get('content'))}" for turn in turns
        )
    prompt = body.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    return "\x02".join(map(str, prompt)) if isinstance(prompt, Sequence) else ""


def group(prompts: Sequence[str]) -> list[Group]:
    """Groups of all prompts; those that share nothing are groups of one."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    groups: list[Group] = []
    members: list[int] = []
    shared = 0
    for position in order:
        common = _common(prompts[members[-1]], prompts[position]) if members else 0
        # A longer prefix than the group's own would be lost by cutting; a shorter one joins less.
        if members and common >= SHARED_CHARS_MIN:
            shared = min(shared, common) if len(members) > 1 else common
            members.append(position)
            continue
        if members:
            groups.append(Group(tuple(sorted(members)), shared))
        members, shared = [position], 0
    if members:
        groups.append(Group(tuple(sorted(members)), shared))
    return groups


def _common(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
