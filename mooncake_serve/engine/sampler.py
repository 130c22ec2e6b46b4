"""From logits to a token: greedy, or drawn after temperature, top-k and top-p.

Each request draws from its own generator, so that its tokens do not depend on who shares the
batch; a seed makes them repeatable. Logits and log-probabilities are float32; log-probabilities
are those of the model, before temperature and filters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake_serve.engine.protocol import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token and what was asked about it."""

    token_id: int
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Sampler:
    """One request's sampling state."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    @property
    def is_plain_greedy(self) -> bool:
        """The caller may take the argmax itself, for a whole batch at once."""
        return self._params.temperature <= 0 and self._params.logprobs is None

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Choose from float32 logits `[vocab]`."""
        logits = logits.cpu()
        if self._generator is None:
            token = int(logits.argmax())
        else:
            token = self._draw(logits, self._generator)
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

    def _draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Only the kept tokens, most likely first, enter the draw."""
        params = self._params
        count = min(params.top_k, logits.shape[0]) if params.top_k > 0 else logits.shape[0]
        values, ids = (logits / params.temperature).topk(count)
        probabilities = torch.softmax(values, dim=-1)
        if params.top_p < 1:
            before = probabilities.cumsum(dim=-1) - probabilities
            # The most likely token has nothing before it, so one always stays.
            probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
            probabilities[0] = max(float(probabilities[0]), torch.finfo(torch.float32).tiny)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
