"""From logits to a token: penalties, bias and grammar, then greedy or drawn after temperature,
min-p, top-k and top-p.

Each request draws from its own generator, so that its tokens do not depend on who shares the
batch; a seed makes them repeatable. Logits and log-probabilities are float32; log-probabilities
are those of the model, before any setting. A request that sets none of the first three gets the
very bits it got without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mooncake_serve.engine.grammar import Matcher
from mooncake_serve.engine.protocol import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token and what was asked about it."""

    token_id: int
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Sampler:
    """One request's sampling state."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] = (), matcher: Matcher | None = None
    ) -> None:
        self._params = params
        self._matcher = matcher
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
        self._penalties = _Penalties(params, prompt) if params.penalizes else None
        self._bias = _indexed(dict(params.logit_bias)) if params.logit_bias else None

    @property
    def is_plain_greedy(self) -> bool:
        """The caller may take the argmax itself, for a whole batch at once."""
        return self._params.temperature <= 0 and self._params.logprobs is None and not self._adjusts

    @property
    def complete(self) -> bool:
        """The grammar allows no further token."""
        return self._matcher is not None and self._matcher.complete

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Choose from float32 logits `[vocab]`. Raises GrammarFailed."""
        logits = logits.cpu()
        adjusted = self._adjust(logits) if self._adjusts else logits
        if self._generator is None:
            token = int(adjusted.argmax())
        else:
            token = self._draw(adjusted, self._generator)
        if self._penalties is not None:
            self._penalties.count(token)
        if self._matcher is not None:
            self._matcher.advance(token)
        if self._params.logprobs is None:
            return Sampled(token)
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = logprobs.topk(min(self._params.logprobs, logits.shape[0]))
        top = zip(ids.tolist(), values.tolist(), strict=True)
        return Sampled(
            token,
            TokenLogprob(token, float(logprobs[token])),
            tuple(TokenLogprob(each, value) for each, value in top),
        )

    @property
    def _adjusts(self) -> bool:
        return any(part is not None for part in (self._penalties, self._bias, self._matcher))

    def _adjust(self, logits: torch.Tensor) -> torch.Tensor:
        if self._penalties is not None:
            logits = self._penalties.apply(logits)
        if self._bias is not None:
            ids, values = self._bias
            logits = logits.index_add(0, ids, values)
        return logits if self._matcher is None else self._matcher.mask(logits)

    def _draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Only the kept tokens, most likely first, enter the draw."""
        params = self._params
        count = min(params.top_k, logits.shape[0]) if params.top_k > 0 else logits.shape[0]
        values, ids = (logits / params.temperature).topk(count)
        probabilities = torch.softmax(values, dim=-1)
        if params.min_p > 0:
            # The first is the most likely: it always stays.
            kept = int((probabilities >= params.min_p * probabilities[0]).sum()) or 1
            probabilities = torch.softmax(values[:kept], dim=-1)
        if params.top_p < 1:
            before = probabilities.cumsum(dim=-1) - probabilities
            # The most likely token has nothing before it, so one always stays.
            probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
            probabilities[0] = max(float(probabilities[0]), torch.finfo(torch.float32).tiny)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


class _Penalties:
    """Tokens seen so far, and what seeing them costs: `repetition` counts the prompt too."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._seen = set(prompt) if params.repetition_penalty != 1 else set[int]()
        self._generated: Counter[int] = Counter()

    def count(self, token: int) -> None:
        self._generated[token] += 1
        if self._params.repetition_penalty != 1:
            self._seen.add(token)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        params = self._params
        if self._seen:
            ids = torch.tensor(list(self._seen))
            values = logits[ids]
            scaled = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
            logits = logits.index_copy(0, ids, scaled)
        if self._generated and (params.presence_penalty or params.frequency_penalty):
            costs = {
                token: -params.presence_penalty - params.frequency_penalty * count
                for token, count in self._generated.items()
            }
            ids, values = _indexed(costs)
            logits = logits.index_add(0, ids, values)
        return logits


def _indexed(values: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(list(values)), torch.tensor(list(values.values()), dtype=torch.float32)
