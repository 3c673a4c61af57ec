"""All recompute policies at equal budgets, against full prefill, on labelled requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.conditions import conditions, digest_of
from rolling_kv.bench.fidelity import Arm, measure, reference_of
from rolling_kv.bench.requests import requests_of, window_of
from rolling_kv.bench.rows import Rows
from rolling_kv.bench.statistics import share_of
from rolling_kv.policies import POLICIES, create_policy
from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)
WORKLOADS = ("needle", "multi-query", "multi-value", "variable-tracking", "market")

Progress = Callable[[int, int, str], None]
"""Called with how many requests are done, of how many, and what comes next."""


@dataclass(frozen=True, slots=True)
class PoliciesRun:
    """What is measured.

    Args:
        documents: of a request, from and to.
        requests: of each workload.
        seed: of the workloads.
    """

    workloads: tuple[str, ...] = WORKLOADS
    policies: tuple[str, ...] = ()
    ratios: tuple[float, ...] = RATIOS
    conditioning: str = "isolated"
    documents: tuple[int, int] = (16, 16)
    requests: int = 12
    max_new_tokens: int = 16
    seed: int = 0

    def arms(self) -> list[Arm]:
        """Every policy at every ratio; a policy without a budget once."""
        arms = []
        for name in self.policies or default_policies():
            if create_policy(name).recomputes:
                arms += [Arm(policy=name, ratio=ratio) for ratio in self.ratios]
            else:
                arms.append(Arm(policy=name, ratio=0.0))
        return arms


def default_policies() -> tuple[str, ...]:
    """All but full prefill, and sink repair over the policy that ranks documents by the query as well."""
    names = [name for name in POLICIES if name not in ("full-prefill", "sink-repair")]
    return (*names, "sink-repair:document-aligned", "sink-repair:qcfuse-spans")


def run(
    engine: TransformersHost, plan: PoliciesRun, *, rows_path: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Measures what `rows_path` does not hold yet, and returns all rows, one a request.

    Requests of the workloads take turns, so that a run that is stopped early has some of each. The arms of a
    request run in an order that is turned by one from request to request.
    """
    requests = {
        workload: requests_of(workload, seed=plan.seed, documents=plan.documents, count=plan.requests)
        for workload in plan.workloads
    }
    settings = asdict(plan) | {
        "kind": "policies",
        "policies": list(plan.policies or default_policies()),
        "requests_digest": digest_of(requests),
    }
    with Rows(rows_path, settings=settings | conditions(engine)) as rows:
        _measure_left(engine, plan, requests, rows, progress=progress)
        return rows.rows


def _measure_left(
    engine: TransformersHost,
    plan: PoliciesRun,
    requests: dict[str, list[LabelledRequest]],
    rows: Rows,
    *,
    progress: Progress,
) -> None:
    done = {(row["workload"], row["request"]) for row in rows.rows}
    left = [
        (workload, index)
        for index in range(plan.requests)
        for workload in plan.workloads
        if index < len(requests[workload]) and (workload, index) not in done
    ]
    total = len(left) + len(done)
    for number, (workload, index) in enumerate(left):
        progress(len(done) + number, total, workload)
        rows.add(_row(engine, plan, requests[workload][index], workload=workload, index=index))
    progress(total, total, "done")


def _row(
    engine: TransformersHost, plan: PoliciesRun, request: Any, *, workload: str, index: int
) -> dict[str, Any]:
    arms = plan.arms()
    turn = (index * 7) % len(arms)
    needs = {need.signal for arm in arms for need in create_policy(arm.policy).needs}
    with window_of(engine, request, conditioning=plan.conditioning, anchors="anchors" in needs) as session:
        reference = reference_of(session, request, max_new_tokens=plan.max_new_tokens)
        outcomes = {
            arm.name: asdict(arm) | measure(session, request, reference, arm).to_dict()
            for arm in (*arms[turn:], *arms[:turn])
        }
    return {
        "workload": workload,
        "request": index,
        "documents": len(request.documents),
        "prompt_tokens": reference.prompt_tokens,
        "full_prefill": {
            "text": reference.text,
            "tokens": len(reference.token_ids),
            "right": reference.right,
            "ttft": reference.ttft,
        },
        "arms": {arm.name: outcomes[arm.name] for arm in arms},
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a workload (and one over all of them) and arm, in the order of the arms."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    entries = []
    for workload in [*workloads, *(["all"] if len(workloads) > 1 else [])]:
        own = [row for row in rows if workload in ("all", row["workload"])]
        entries += [_entry(workload, arm, own) for arm in own[0]["arms"]]
    return entries


def _entry(workload: str, arm: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outcomes = [row["arms"][arm] for row in rows]
    right = [row["arms"][arm]["agrees"] for row in rows if row["full_prefill"]["right"]]
    speedups = [row["full_prefill"]["ttft"] / row["arms"][arm]["ttft"] for row in rows]
    return {
        "workload": workload,
        "policy": outcomes[0]["policy"],
        "ratio": outcomes[0]["ratio"],
        "requests": len(rows),
        "answer_agreement": asdict(share_of([one["agrees"] for one in outcomes])),
        "agreement_where_right": asdict(share_of(right)) if right else None,
        "top1": fmean(one["top1"] for one in outcomes),
        "kl": fmean(one["kl"] for one in outcomes),
        "recall": _mean(one["recall"] for one in outcomes),
        "captured_deviation": _mean(one["captured_deviation"] for one in outcomes),
        "segments": median(one["segments"] for one in outcomes),
        "select_seconds": median(one["select"] for one in outcomes),
        "ttft_seconds": median(one["ttft"] for one in outcomes),
        "speedup": median(speedups),
        "degraded": sorted({reason for one in outcomes for reason in one["degraded"]}),
    }


def _mean(values: Iterator[float | None] | Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def markdown(entries: Sequence[dict[str, Any]], *, workload: str) -> str:
    """The table of one workload: a row a policy, a column a ratio.

    In a cell: agreement with its interval, agreement where full prefill is right, KL and recall.
    """
    own = [entry for entry in entries if entry["workload"] == workload]
    ratios = sorted({entry["ratio"] for entry in own if entry["ratio"] > 0})
    lines = [
        "| policy | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |",
        "|---|" + "---|" * len(ratios),
    ]
    for policy in dict.fromkeys(entry["policy"] for entry in own):
        cells = {entry["ratio"]: _cell(entry) for entry in own if entry["policy"] == policy}
        shown = [cells.get(ratio, cells.get(0.0, "")) for ratio in ratios]
        lines.append(f"| `{policy}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(entry: dict[str, Any]) -> str:
    agreement = entry["answer_agreement"]
    right = entry["agreement_where_right"]
    where_right = "" if right is None else f", where right {right['hits']} of {right['count']}"
    recall = "" if entry["recall"] is None else f", recall {entry['recall']:.2f}"
    return (
        f"{agreement['share']:.2f} ({agreement['low']:.2f} to {agreement['high']:.2f})"
        f"{where_right}, KL {entry['kl']:.3f}{recall}"
    )
