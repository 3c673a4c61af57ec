"""Rolling market events: an endless, seeded stream of invented records, and questions about a window of it.

Three channels (daily prices, news headlines, filing titles) of 15 invented companies are interleaved on one
calendar of business days, each channel in date order. It has the shape of the workload of "Request Order
Matters", section 4.1 (15 equities; 83.5% prices, 8.8% headlines, 7.6% filing titles; 84 documents of about 90
tokens a window), and none of its data: companies, prices and events are made up from the seed.

The short texts and the questions are worded so that very small models answer them: a record names its company
in full with its line of business, the number follows at once, dates are in words, and the answer's start
repeats the record's own.
"""

from __future__ import annotations

import datetime
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from rolling_kv.errors import ConfigError, WindowError
from rolling_kv.workloads.request import LabelledRequest, TextSpan, holds_whole, require_questions

Detail = Literal["short", "long"]
EventKind = Literal["price", "news", "filing"]
QuestionKind = Literal["field", "copy"]

INSTRUCTION = "You are a market analyst. Answer from the records."

_TRIES = 5  # for each of several questions that are to differ

_START = datetime.date(2024, 3, 4)  # a Monday
_HOLIDAYS = frozenset({(1, 1), (7, 4), (12, 25)})  # (month, day), the same every year
_NEWS_RATE = 792 / 7515  # headlines a price record, as in the paper's data
_FILING_RATE = 688 / 7515  # filing titles a price record
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)  # spelled here because the calendar module's follow the locale


@dataclass(frozen=True, slots=True)
class _Company:
    ticker: str
    name: str
    line: str
    first_close: float

    def __str__(self) -> str:
        return f"the {self.line} company {self.name} ({self.ticker})"


_COMPANIES = (
    _Company("NVLA", "Novela Systems", "chips", 470.0),
    _Company("BRKO", "Broko Foods", "groceries", 248.0),
    _Company("TERV", "Tervane Energy", "natural gas", 692.0),
    _Company("ZEPH", "Zephyr Airways", "air travel", 361.0),
    _Company("QUIL", "Quillon Media", "streaming", 133.0),
    _Company("MOND", "Mondara Bank", "consumer loans", 884.0),
    _Company("HALC", "Halcyon Pharma", "vaccines", 215.0),
    _Company("FERR", "Ferrant Steel", "rolled steel", 537.0),
    _Company("OPAL", "Opaline Retail", "home goods", 773.0),
    _Company("KEST", "Kestrel Motors", "electric vans", 948.0),
    _Company("LUMI", "Lumiard Optics", "laser sensors", 419.0),
    _Company("GRAV", "Gravell Mining", "copper ore", 655.0),
    _Company("SOLV", "Solvane Software", "payroll software", 304.0),
    _Company("PIKE", "Pikeford Rail", "rail freight", 557.0),
    _Company("WEXA", "Wexalo Telecom", "mobile networks", 828.0),
)
_BY_TICKER = {company.ticker: company for company in _COMPANIES}

_PLACES = ("Arlen", "Bridgeport", "Calloway", "Dunmore", "Eastvale", "Fairholt", "Granby", "Hollis")
_AGENCIES = ("Harbour Wire", "Meridian Dispatch", "Northgate Bulletin")
_HEADLINES = (
    "won a {amount} million dollar order for {line} from {place}",
    "opened a {amount} million dollar plant for {line} in {place}",
    "cut {amount} jobs in its {line} unit in {place}",
    "settled a {amount} million dollar claim over {line} in {place}",
    "bought a rival in {line} from {place} for {amount} million dollars",
    "raised its forecast for {line} by {amount} million dollars after demand in {place}",
)
# (form, title)
_FILINGS = (
    ("8-K", "departure of a director and election of a new chair in {place}"),
    ("8-K", "entry into a material agreement for {line} worth {amount} million dollars"),
    ("10-Q", "quarterly report with {amount} million dollars of revenue from {line}"),
    ("S-3", "registration of {amount} million new shares"),
    ("4", "statement of a change in ownership of {amount} thousand shares"),
    ("8-K", "results of operations with {amount} million dollars of free cash flow"),
)


@dataclass(frozen=True, slots=True)
class MarketEvent:
    """One document of the stream.

    `fields` holds what a question can ask for, in text order: (name, the value exactly as it stands in
    `text`). `id` is unique in a stream: channel, date, ticker ("px-2024-03-05-NVLA"; "nw" and "fl" for news
    and filings).
    """

    id: str
    kind: EventKind
    ticker: str
    date: datetime.date
    text: str
    fields: tuple[tuple[str, str], ...]

    def value(self, name: str) -> str:
        """The text of the field `name`; a KeyError names the fields there are."""
        for known, value in self.fields:
            if known == name:
                return value
        raise KeyError(
            f"{self.id} has no field {name!r}; it has {', '.join(known for known, _ in self.fields)}"
        )

    def places(self) -> dict[str, tuple[int, int]]:
        """Where the value of each field stands in `text`: name to (start, stop), in characters."""
        places: dict[str, tuple[int, int]] = {}
        stop = 0
        for name, value in self.fields:  # in text order, so that equal values keep their own places
            start = self.text.index(value, stop)
            stop = start + len(value)
            places[name] = (start, stop)
        return places


@dataclass(frozen=True, slots=True)
class MarketQuestion:
    """A question with exactly one right answer in its window.

    `answer_prefix` starts the assistant's turn; the right answer goes on with `expected`, which stands
    verbatim in the text of the event `event_id`, at `span` of the window.
    """

    query: str
    answer_prefix: str
    expected: str
    event_id: str
    span: TextSpan

    def is_right(self, answer: str) -> bool:
        """Whether `answer` holds `expected` whole; see `holds_whole`."""
        return holds_whole(answer, self.expected)


def market_events(seed: int, *, detail: Detail = "short") -> Iterator[MarketEvent]:
    """The endless stream of `seed`, oldest first (it ends with the calendar, in the year 9999).

    The same seed gives the same events however many are taken, and the same facts for either `detail`:
    "short" texts have about 35 tokens, "long" ones about 89 on average (SmolLM2's tokenizer), so that 84 of
    them make the 7.2K to 7.7K tokens of the paper's prompts. ConfigError for another `detail`.
    """
    if detail not in ("short", "long"):
        raise ConfigError(f"detail is {detail!r}; expected 'short' or 'long'")
    return _stream(random.Random(f"market-events:{seed}"), detail)


def _stream(rng: random.Random, detail: Detail) -> Iterator[MarketEvent]:
    closes = {company.ticker: company.first_close for company in _COMPANIES}
    for day in _business_days():
        today: list[MarketEvent] = []
        for company in _COMPANIES:
            price, closes[company.ticker] = _price(rng, day, company, closes[company.ticker], detail)
            today.append(price)
            if rng.random() < _NEWS_RATE:
                today.append(_news(rng, day, company, detail))
            if rng.random() < _FILING_RATE:
                today.append(_filing(rng, day, company, detail))
        rng.shuffle(today)
        yield from today


def _business_days() -> Iterator[datetime.date]:
    day = _START
    while True:
        if day.weekday() < 5 and (day.month, day.day) not in _HOLIDAYS:
            yield day
        if day == datetime.date.max:
            return
        day += datetime.timedelta(days=1)


def _price(
    rng: random.Random, day: datetime.date, company: _Company, previous: float, detail: Detail
) -> tuple[MarketEvent, float]:
    """The day's price record, and the close that the next day starts from."""
    start = previous + 0.02 * (company.first_close - previous)  # drawn back, so that no price runs away
    opened = start * rng.uniform(0.99, 1.01)
    closed = opened * rng.uniform(0.97, 1.03)
    high, low = max(opened, closed) * rng.uniform(1.0, 1.02), min(opened, closed) * rng.uniform(0.98, 1.0)
    numbers = (
        ("open", f"{opened:.2f}"),
        ("high", f"{high:.2f}"),
        ("low", f"{low:.2f}"),
        ("close", f"{closed:.2f}"),
        ("average", f"{(high + low + closed) / 3:.2f}"),
        ("volume", f"{rng.randrange(400_000, 9_000_000):,}"),
    )
    if detail == "short":
        fields: tuple[tuple[str, str], ...] = (numbers[3],)
        text = f"{_capital(company)} closed at {closed:.2f} dollars on {_written(day)}."
    else:
        fields = numbers
        listed = ", ".join(f"{name} {value}" for name, value in numbers)
        text = (
            f"Daily price record of {_written(day)} for {company}, prices in dollars: {listed} shares traded."
        )
    return MarketEvent(f"px-{day}-{company.ticker}", "price", company.ticker, day, text, fields), closed


def _news(rng: random.Random, day: datetime.date, company: _Company, detail: Detail) -> MarketEvent:
    headline = _filled(rng, rng.choice(_HEADLINES), company)
    agency, share = rng.choice(_AGENCIES), rng.uniform(2, 98)
    clock = f"{rng.randrange(7, 18):02}:{rng.randrange(60):02}"
    text = f"News: {company} {headline} on {_written(day)}."
    if detail == "long":
        text += (
            f" The {agency} carried the headline at {clock} and wrote that {share:.1f} percent of the"
            f" analysts it had asked expected as much before the market opened."
        )
    return MarketEvent(
        f"nw-{day}-{company.ticker}", "news", company.ticker, day, text, (("headline", headline),)
    )


def _filing(rng: random.Random, day: datetime.date, company: _Company, detail: Detail) -> MarketEvent:
    form, template = rng.choice(_FILINGS)
    title = _filled(rng, template, company)
    number = f"{rng.randrange(10**9, 2 * 10**9):010}-{day.year % 100:02}-{rng.randrange(10**6):06}"
    text = f"{_capital(company)} filed form {form}, {title}, on {_written(day)}."
    if detail == "long":
        text += f" The registry accepted the filing as number {number} and published it on the same day."
    fields = (("form", form), ("title", title))
    return MarketEvent(f"fl-{day}-{company.ticker}", "filing", company.ticker, day, text, fields)


def _filled(rng: random.Random, template: str, company: _Company) -> str:
    return template.format(amount=rng.randrange(12, 990), line=company.line, place=rng.choice(_PLACES))


def _capital(company: _Company) -> str:
    return f"T{str(company)[1:]}"


def _written(day: datetime.date) -> str:
    """The date in words ("4 March 2024"): strings of digits would compete with the numbers asked for."""
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def market_question(
    window: Sequence[MarketEvent], *, seed: int, step: int, number: int = 0
) -> MarketQuestion:
    """Ask for one field of one observation of `window`, chosen by `seed`, `step` and, of one step, `number`.

    Observations whose company has no other record of the channel in the window are preferred: two dates of
    one company are what small models mix up. The same arguments always ask the same. WindowError when every
    record of the window contradicts another one of the same channel, company and day.
    """
    rng = _choosing("market-question", seed, step, number)
    event = rng.choice(_alone(_askable(window), window))
    name = "title" if event.kind == "filing" else rng.choice(event.fields)[0]
    place, stop = event.places()[name]
    company = _BY_TICKER[event.ticker]
    asked = {"close": "closing price", "headline": "news headline", "title": "filing title"}.get(name, name)
    if event.kind == "price" and len(event.fields) > 1:
        start = f" The {asked} of {company.name} on {_written(event.date)} was"
    else:
        start = f" {event.text[:place].rstrip()}"
    return MarketQuestion(
        query=f"\nQuestion: What was the {asked} of {company.name} on {_written(event.date)}?\nAnswer:",
        answer_prefix=start,
        expected=event.text[place:stop],
        event_id=event.id,
        span=TextSpan(window.index(event), place, stop),
    )


def copy_question(window: Sequence[MarketEvent], *, seed: int, step: int, number: int = 0) -> MarketQuestion:
    """Ask to copy the fields of one observation of `window` verbatim (the paper's query).

    `expected` runs from the first field to the last, with the text between them. Choice and errors are those
    of `market_question`, but no observation is preferred.
    """
    rng = _choosing("copy-question", seed, step, number)
    event = rng.choice(_askable(window))
    company = _BY_TICKER[event.ticker]
    places = event.places()
    start, stop = min(places.values())[0], max(places.values())[1]
    return MarketQuestion(
        query=(
            f"\nQuestion: Copy these fields of the {event.kind} record of {company.name} on"
            f" {_written(event.date)} exactly as they stand: {', '.join(places)}.\nAnswer:"
        ),
        answer_prefix=f" {event.text[:start].rstrip()}",
        expected=event.text[start:stop],
        event_id=event.id,
        span=TextSpan(window.index(event), start, stop),
    )


def _choosing(kind: str, seed: int, step: int, number: int) -> random.Random:
    return random.Random(f"{kind}:{seed}:{step}" + (f":{number}" if number else ""))


def market_requests(
    seed: int, *, documents: int, detail: Detail, question: QuestionKind, questions: int = 1
) -> Iterator[LabelledRequest]:
    """Labelled requests over the rolling window of the stream of `seed`.

    The first are over the first `documents` events. After `questions` of them, all different, or fewer where
    so many are not found, the window loses its oldest event and gains one. `question` is "field"
    (`market_question`) or "copy" (`copy_question`). ConfigError for another one, another `detail`, or fewer
    than one document or question.
    """
    ask = {"field": market_question, "copy": copy_question}.get(question)
    if ask is None:
        raise ConfigError(f"question is {question!r}; expected 'field' or 'copy'")
    if documents < 1:
        raise ConfigError(f"documents is {documents}; expected at least 1")
    require_questions(questions)
    return _rolling(market_events(seed, detail=detail), ask, seed, documents, questions)


def _rolling(
    events: Iterator[MarketEvent],
    ask: Callable[..., MarketQuestion],
    seed: int,
    documents: int,
    questions: int,
) -> Iterator[LabelledRequest]:
    window: deque[MarketEvent] = deque(islice(events, documents - 1), maxlen=documents)
    for step, event in enumerate(events):
        window.append(event)
        tries = range(_TRIES * questions if questions > 1 else 1)
        found = {asked.query: asked for asked in (ask(window, seed=seed, step=step, number=n) for n in tries)}
        for asked in islice(found.values(), questions):
            yield LabelledRequest(
                documents=tuple(event.text for event in window),
                query=asked.query,
                answer_prefix=asked.answer_prefix,
                expected=asked.expected,
                spans=(asked.span,),
                instruction=INSTRUCTION,
            )


def _askable(window: Sequence[MarketEvent]) -> list[MarketEvent]:
    """The events that no other event of the same channel, company and day contradicts."""
    texts: dict[tuple[str, str, datetime.date], set[str]] = {}
    for event in window:
        texts.setdefault((event.kind, event.ticker, event.date), set()).add(event.text)
    askable = [event for event in window if len(texts[event.kind, event.ticker, event.date]) == 1]
    if not askable:
        raise WindowError(
            f"none of the {len(window)} records of the window has one right answer; pass a window with "
            "at least one record that no other of the same channel, company and day contradicts"
        )
    return askable


def _alone(events: list[MarketEvent], window: Sequence[MarketEvent]) -> list[MarketEvent]:
    """Those of `events` that are their company's only one of the channel in `window`; all, if none is."""
    counts = Counter((event.kind, event.ticker) for event in window)
    return [event for event in events if counts[event.kind, event.ticker] == 1] or events
