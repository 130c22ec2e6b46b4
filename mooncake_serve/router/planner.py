"""The decision, pure: expected time to first token of each replica, and the smallest.

    TTFT = queue + min over usable prefix p of [load(p) + prefill(length, p)]

`queue` is the prefill work a replica has been given and not finished. Costs start from a guess and
follow what requests report, so that nothing is tuned by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

SMOOTHING = 0.2
"""Weight of a new observation in the running averages."""


@dataclass(slots=True)
class Costs:
    """What work costs, learnt from finished requests. Seconds per token."""

    prefill_s: float = 1e-3
    load_s: float = 1e-5

    def observe(self, computed_tokens: int, loaded_tokens: int, service_s: float) -> None:
        """Learn from one request that waited for nobody: its tokens and its time to first token."""
        if computed_tokens <= 0:
            return
        spent = max(0.0, service_s - loaded_tokens * self.load_s)
        self.prefill_s += SMOOTHING * (spent / computed_tokens - self.prefill_s)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Work a replica has been given and has not answered yet."""

    prefill_tokens: int = 0
    active: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Why a replica was chosen. Seconds; `matched_tokens` can be loaded instead of computed."""

    queue_s: float
    load_s: float
    prefill_s: float
    matched_tokens: int

    @property
    def ttft_s(self) -> float:
        """Expected time to first token."""
        return self.queue_s + self.load_s + self.prefill_s


def score(length: int, matched_tokens: int, load: ReplicaLoad, costs: Costs) -> Score:
    """Expected time to first token of a prompt of `length` tokens on one replica.

    Loading is linear in the prefix, so the minimum lies at one of its ends.
    """
    queue_s = load.prefill_tokens * costs.prefill_s
    loaded = matched_tokens if costs.load_s < costs.prefill_s else 0
    return Score(
        queue_s=queue_s,
        load_s=loaded * costs.load_s,
        prefill_s=(length - loaded) * costs.prefill_s,
        matched_tokens=loaded,
    )


def choose(
    length: int,
    matched_tokens: Mapping[str, int],
    loads: Mapping[str, ReplicaLoad],
    costs: Costs,
    pick: Callable[[list[str]], str],
) -> tuple[str, Score]:
    """The replica with the smallest expected time to first token; `pick` breaks ties.

    Equal times are decided by fewer active requests first. Raises ValueError without replicas.
    """
    if not loads:
        raise ValueError("no replica to choose from")
    scores = {
        name: score(length, matched_tokens.get(name, 0), load, costs)
        for name, load in loads.items()
    }
    rank = {name: (scores[name].ttft_s, loads[name].active) for name in loads}
    best = min(rank.values())
    chosen = pick([name for name, value in rank.items() if value == best])
    return chosen, scores[chosen]
