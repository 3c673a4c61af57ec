"""Which layer's deviations point at the tokens that truly differ, and which tokens become sinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.fidelity import Arm, Outcome
from rolling_kv.bench.laid_out import LaidOut
from rolling_kv.bench.statistics import share_of

if TYPE_CHECKING:
    import torch

_HUGE = 8.0  # a token is a sink when it deviates by so many times the mean in half of the deeper layers
_COMMON = 0.1  # share of the found sinks that a token id needs to count as one of the model's


@dataclass(slots=True)
class DeviationLayers:
    """Deviations of all layers, gathered over requests; layer 0 has none, its keys see no other token."""

    layers: int
    recalls: list[list[float]] = field(default_factory=list)
    sinks: Counter[int] = field(default_factory=Counter)
    shares: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    token_counts: Counter[int] = field(default_factory=Counter)
    outcomes: dict[Arm, list[Outcome]] = field(default_factory=dict)

    def add(self, request: LaidOut) -> None:
        """Measures one request.

        The tokens that truly differ are the tenth with the largest deviation, each layer's divided by its
        mean, summed over the layers.
        """
        import torch

        from rolling_kv.policies.spans import largest

        deviation = request.deviations()
        relative = deviation / deviation.mean(1, keepdim=True).clamp_min(1e-12)
        count = max(1, relative.shape[1] // 10)
        truth = set(largest(relative[1:].sum(0), count).tolist())
        self.recalls.append(
            [len(truth & set(largest(deviation[n], count).tolist())) / count for n in range(self.layers)]
        )
        deeper = relative[self.layers // 2 :]
        found = ((deeper > _HUGE).float().mean(0) > 0.5).nonzero()[:, 0]
        ids = request.plan.prompt.token_ids[request.plan.prefix : request.plan.query_start]
        self.sinks.update(ids[index] for index in found.tolist())
        self.token_counts.update(ids)
        self.tokens += len(ids)
        if len(found):
            self.shares.append(torch.stack([relative[:, index] for index in found.tolist()]))

    def sink_traits(self) -> tuple[tuple[int, ...], int | None]:
        """The token ids that become sinks, commonest first, and the first layer that shows them plainly.

        That is the first at which they deviate, by the median, half as much over the mean as at their best.
        """
        import torch

        total = self.sinks.total()
        if not total:
            return (), None
        by_layer = torch.cat(self.shares).median(0).values
        layer = int((by_layer >= by_layer.max() / 2).nonzero()[0])
        common = tuple(token for token, count in self.sinks.most_common() if count >= _COMMON * total)
        return (common, layer) if common and layer >= 1 else ((), None)

    def report(self, decode: Any) -> dict[str, Any]:
        """Recall, cost and agreement by layer, and the sinks.

        Args:
            decode: from token ids to text.
        """
        ids, layer = self.sink_traits()
        return {
            "layers": [self._layer(number) for number in range(1, self.layers)],
            "sinks": {
                "found": self.sinks.total(),
                "requests": len(self.recalls),
                "token_ids": list(ids),
                "texts": [decode([token]) for token in ids],
                "layer": layer,
                "share_of_tokens": sum(self.token_counts[token] for token in ids) / max(1, self.tokens),
            },
        }

    def _layer(self, number: int) -> dict[str, Any]:
        measured = {
            arm.policy: outcomes for arm, outcomes in self.outcomes.items() if arm.selection_layer == number
        }
        return {
            "layer": number,
            "cost": number / self.layers,  # of a full prefill: the layers that all tokens run through
            "recall_of_differing": fmean(recalls[number] for recalls in self.recalls),
            "policies": {policy: _summary(outcomes) for policy, outcomes in measured.items()},
        }


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    share = share_of([one.agrees for one in outcomes])
    return {
        "answer_agreement": share.share,
        "low": share.low,
        "high": share.high,
        "top1": fmean(one.top1 for one in outcomes),
        "kl": fmean(one.kl for one in outcomes),
        "ttft_seconds": median(one.ttft for one in outcomes),
    }
