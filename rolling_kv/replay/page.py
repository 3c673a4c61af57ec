"""The report as one HTML file that needs nothing else: no script, no network."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from rolling_kv.errors import MissingExtraError
from rolling_kv.replay.groups import differing
from rolling_kv.replay.parting import MEANING, sentence
from rolling_kv.replay.plots import PLOTS, inline

if TYPE_CHECKING:
    from rolling_kv.bench.statistics import Share
    from rolling_kv.replay.metrics import ArmFigures
    from rolling_kv.replay.report import ReplayReport

SHOWN_REQUESTS = 50
"""Of one arm, with their answers in full; report.json has all."""


def require_page() -> None:
    """Fails early where the page cannot be made.

    Raises:
        MissingExtraError
    """
    try:
        import jinja2  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError(
            "The report page needs jinja2, which is not installed. Run: pip install 'rolling-kv[bench]'"
        ) from error


def page(report: ReplayReport) -> str:
    """The report, as HTML. Texts of answers and documents are escaped: they are anybody's.

    Raises:
        MissingExtraError
    """
    require_page()
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": _percent,
        "interval": _interval,
        "seconds": _seconds,
        "p": _p,
        "sentence": sentence,
    }
    source = files("rolling_kv.replay").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        verdicts={arm.arm: verdict(arm) for arm in report.arms},
        plots={name: inline(name, report) for name in PLOTS},
        differing={
            arm.arm: differing(report.runs, arm.arm, tolerance=report.tie_tolerance) for arm in report.arms
        },
        kinds={arm.arm: kinds(arm) for arm in report.arms},
        meaning=MEANING,
        shown=SHOWN_REQUESTS,
    )


def verdict(arm: ArmFigures) -> str:
    """What the variation says, in a sentence."""
    if arm.variation is None:
        return "Replayed in one order: that shows no variation."
    if arm.variation.hits == 0:
        bits = (
            "the first logits have equal bits"
            if _none(arm.logits_differ)
            else "the first logits differ in bits"
        )
        return f"No answer depends on the order ({arm.variation.count:,} pairs of orders); {bits}."
    assert arm.varying is not None, "an arm with pairs of orders has requests with pairs"
    return (
        f"Answers depend on the order: {arm.variation.hits:,} of {arm.variation.count:,} pairs of orders "
        f"differ, in {arm.varying.hits:,} of {arm.varying.count:,} requests."
    )


def kinds(arm: ArmFigures) -> dict[str, int]:
    """How many pairs of orders part in each way."""
    return {kind: sum(one.kind == kind for one in arm.partings) for kind in MEANING}


def _none(share: Share | None) -> bool:
    return share is not None and share.hits == 0


def _percent(share: Share | None) -> str:
    return "" if share is None else f"{share.share:.1%}"


def _interval(share: Share | None) -> str:
    return "" if share is None else f"{share.low:.1%} to {share.high:.1%}"


def _seconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms"


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.2g}"
