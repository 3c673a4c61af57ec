"""The report: as JSON, as a page that is safe and complete, as plots, and as a table."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rolling_kv.bench.statistics import share_of
from rolling_kv.errors import ConfigError
from rolling_kv.replay.page import SHOWN_REQUESTS, page
from rolling_kv.replay.plots import PLOTS
from rolling_kv.replay.report import ReplayReport, details, notes, summarise, table, write_report
from tests.replay.synthetic import Synthetic, grid, reference, row

HOSTILE = "<script>alert(1)</script> & \"quotes\" '' </pre> \u202e\ud800 [bold]"


@pytest.fixture(scope="module")
def report() -> ReplayReport:
    return summarise(*Synthetic(requests=12).rows(), settings={"model": "demo", "arms": ["a", "b"]})


@pytest.fixture(scope="module")
def hostile() -> ReplayReport:
    """Every text of a user's or a model's is hostile; one order is not complete."""
    references = [reference(n, query=HOSTILE, text=HOSTILE, segments=("i", HOSTILE, "q")) for n in (0, 1)]
    name = "$arm$ <i>"
    rows = [
        row(name, "chronological", 0, text=HOSTILE, kv_fingerprint=""),
        row(name, "chronological", 1, text=HOSTILE, kv_fingerprint="", degraded=(HOSTILE,)),
        row(name, "<b>_{x}$", 0, text=f"{HOSTILE} other", token_ids=(1,), kv_fingerprint=""),
    ]
    return summarise(references, rows, settings={"<u>": HOSTILE})


class Page(HTMLParser):
    """The tags of a page, and those that were never closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_everything_is_written(report: ReplayReport, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    write_report(report, out)
    assert {path.name for path in out.iterdir()} == {
        "report.json",
        "report.html",
        *(f"{name}.png" for name in PLOTS),
    }
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in PLOTS)
    found = json.loads((out / "report.json").read_text())
    assert found == json.loads(json.dumps(report.to_dict()))
    assert found["orders"] == ["chronological", "reversed", "random:0", "random:1", "random:2"]
    assert found["controls"] == ["repeat", "reset"]
    arm = found["arms"]["token-topk:first-seen"]
    assert arm["repeat"]["exact"] is True
    assert arm["variation"]["share"] == report.variation("token-topk:first-seen").share
    assert len(arm["partings"]) == arm["variation"]["hits"]


def test_the_page_says_which_arms_vary(report: ReplayReport) -> None:
    source = page(report)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", source))
    variation = report.variation("token-topk:first-seen")
    assert variation.hits > 0
    assert f"Answers depend on the order: {variation.hits} of 120 pairs of orders differ" in text
    assert text.count("No answer depends on the order (120 pairs of orders)") == 2
    assert text.count("gave the same answers, logits and KV, bit by bit, in all 12 requests") == 4
    parting = report.arm("token-topk:first-seen").partings[0]
    assert f"their KV differs first at layer {parting.layer}, in &#39;{parting.segment_name}&#39;" in text


def test_the_page_needs_nothing_else(report: ReplayReport) -> None:
    found = Page(page(report))
    assert found.open == []
    assert not {"script", "link", "iframe", "object", "base"} & set(found.tags)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in found.attributes
    sources = [value for name, value in found.attributes if name in ("src", "href", "srcset")]
    assert len(sources) == len(PLOTS)
    assert all(value and value.startswith("data:image/svg+xml;base64,") for value in sources)


def test_texts_are_escaped(hostile: ReplayReport, tmp_path: Path) -> None:
    write_report(hostile, tmp_path)
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = Page(source)
    assert found.open == []
    assert not {"script", "b", "i", "u"} & set(found.tags)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in source
    assert json.loads((tmp_path / "report.json").read_text())["arms"]["$arm$ <i>"]["degraded"] == [HOSTILE]


def test_what_is_missing_is_said(hostile: ReplayReport) -> None:
    source = page(hostile)
    assert "lacks 1 of 2 requests" in source
    assert "did not run as asked" in source
    said = "\n".join(notes(hostile))
    assert "'<b>_{x}$' lacks 1 of 2 requests" in said
    assert "the chronological order was not repeated" in source


def test_a_repeat_that_differs_is_said() -> None:
    rows = [
        row("a", "chronological", 0),
        row("a", "reversed", 0),
        row("a", "repeat", 0, logits_fingerprint="b"),
    ]
    found = summarise([reference(0)], rows)
    assert "was not the same" in page(found)
    assert any(
        "NOT the same: of 1 requests 0 differ in the answer, 1 in logits" in one for one in notes(found)
    )


def test_an_answer_that_keeps_while_its_logits_do_not_is_no_clean_verdict() -> None:
    rows = [
        row("a", "chronological", 0),
        row("a", "reversed", 0, logits_fingerprint="b", kv_fingerprint=grid(1, (0, 0))),
    ]
    source = page(summarise([reference(0)], rows))
    assert "the first logits differ in bits" in source
    assert "The bits of its KV do, in 1 of 1 requests" in source


def test_a_long_list_is_cut_and_says_so() -> None:
    many = SHOWN_REQUESTS + 3
    rows = [row("a", "chronological", n) for n in range(many)]
    rows += [row("a", "reversed", n, token_ids=(1,)) for n in range(many)]
    source = page(summarise([reference(n) for n in range(many)], rows))
    assert source.count("<summary>Request") == SHOWN_REQUESTS
    assert "3 more requests differ; report.json has them all" in source


def test_the_table_fits_eighty_columns(report: ReplayReport) -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table(report))
    shown = console.export_text()
    assert "12 requests in 5 orders" in shown
    variation = report.variation("token-topk:first-seen")
    assert f"{variation.share:.2f}" in shown
    assert f"{variation.low:.2f}-{variation.high:.2f}" in shown
    assert "…" not in shown


def test_details_name_every_differing_request(report: ReplayReport, hostile: ReplayReport) -> None:
    lines = list(details(report))
    arm = report.arm("token-topk:first-seen")
    assert arm.varying is not None
    headings = [line for line in lines if line.startswith("token-topk:first-seen, request")]
    assert len(headings) == arm.varying.hits
    assert any("    from chronological, history: their KV differs first at layer" in line for line in lines)
    assert all("\u202e" not in line for line in details(hostile))


def test_shares_are_asked_for_by_name(report: ReplayReport) -> None:
    assert report.fidelity("full-prefill", "reversed") == share_of([True] * 12)
    assert report.fidelity("full-prefill", "reset").share == 1.0
    assert report.fidelity("full-prefill", "all").count == 60
    with pytest.raises(
        ConfigError, match=r"No arm 'topk' was replayed\. Replayed ones: token-topk:first-seen"
    ):
        report.variation("topk")
    with pytest.raises(ConfigError, match=r"no fidelity for order 'random:9'.*chronological, reversed"):
        report.fidelity("full-prefill", "random:9")
    single = summarise([reference(0)], [row("a", "chronological", 0)])
    with pytest.raises(ConfigError, match="fewer than two orders"):
        single.variation("a")
    assert "shows no variation" in page(single)


def test_full_prefill_may_have_nothing_expected() -> None:
    assert summarise([reference(0, right=None)], [row("a", "reversed", 0)]).right is None
    right = summarise([reference(0), reference(1, right=False)], [row("a", "reversed", 0)]).right
    assert right is not None
    assert (right.hits, right.count) == (1, 2)
