"""Rolling market events: an endless, seeded stream of invented records, and questions about a window of it.

Three channels (daily prices, news headlines, filing titles) of 15 invented companies are interleaved on one
calendar of business days, each channel in date order. It has the shape of the workload of "Request Order
Matters", section 4.1 (15 equities; 83.5% prices, 8.8% headlines, 7.6% filing titles; 84 documents of about 90
tokens a window), and none of its data: companies, prices and events are made up from the seed.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Detail = Literal["short", "long"]
EventKind = Literal["price", "news", "filing"]

_START = datetime.date(2024, 3, 4)  # a Monday
_HOLIDAYS = frozenset({(1, 1), (7, 4), (12, 25)})  # (month, day), the same every year
_NEWS_RATE = 0.105  # headlines a company and day: 792 / 7515 in the paper's data
_FILING_RATE = 0.092  # filing titles a company and day: 688 / 7515 in the paper's data

# (ticker, company, line of business, first close)
_COMPANIES = (
    ("NVLA", "Novela Systems", "chips", 170.0),
    ("BRKO", "Broko Foods", "groceries", 48.0),
    ("TERV", "Tervane Energy", "natural gas", 92.0),
    ("ZEPH", "Zephyr Airways", "air travel", 61.0),
    ("QUIL", "Quillon Media", "streaming", 133.0),
    ("MOND", "Mondara Bank", "consumer loans", 84.0),
    ("HALC", "Halcyon Pharma", "vaccines", 215.0),
    ("FERR", "Ferrant Steel", "rolled steel", 37.0),
    ("OPAL", "Opaline Retail", "home goods", 73.0),
    ("KEST", "Kestrel Motors", "electric vans", 248.0),
    ("LUMI", "Lumiard Optics", "laser sensors", 119.0),
    ("GRAV", "Gravell Mining", "copper ore", 55.0),
    ("SOLV", "Solvane Software", "payroll software", 304.0),
    ("PIKE", "Pikeford Rail", "rail freight", 157.0),
    ("WEXA", "Wexalo Telecom", "mobile networks", 28.0),
)

_PLACES = ("Arlen", "Bridgeport", "Calloway", "Dunmore", "Eastvale", "Fairholt", "Granby", "Hollis")
_HEADLINES = (
    "wins a {amount} million dollar order for {line} from {place}",
    "opens a {amount} million dollar plant for {line} in {place}",
    "cuts {amount} jobs in its {line} unit in {place}",
    "recalls {amount} thousand units of {line} sold in {place}",
    "buys a rival in {line} from {place} for {amount} million dollars",
    "raises its forecast for {line} by {amount} million dollars after demand in {place}",
)
_FILINGS = (
    ("8-K", "Departure of a director; election of a new chair in {place}"),
    ("8-K", "Entry into a material agreement for {line} worth {amount} million dollars"),
    ("10-Q", "Quarterly report with {amount} million dollars of revenue from {line}"),
    ("S-3", "Registration of {amount} million new shares"),
    ("4", "Statement of a change in ownership of {amount} thousand shares"),
    ("8-K", "Results of operations; {amount} million dollars of free cash flow"),
)


@dataclass(frozen=True, slots=True)
class MarketEvent:
    """One document of the stream.

    `fields` holds what a question can ask for, in text order: (name, the value exactly as it stands in
    `text`). `id` is unique in a stream: channel, date, ticker ("px-2024-03-05-NVLA").
    """

    id: str
    kind: EventKind
    ticker: str
    date: datetime.date
    text: str
    fields: tuple[tuple[str, str], ...]

    def value(self, name: str) -> str:
        """The text of the field `name`; KeyError names the fields there are."""
        for known, value in self.fields:
            if known == name:
                return value
        raise KeyError(f"{self.id} has no field {name!r}; it has {', '.join(n for n, _ in self.fields)}")


@dataclass(frozen=True, slots=True)
class MarketQuestion:
    """A question with exactly one right answer in its window.

    `answer_prefix` starts the assistant's turn; the right answer goes on with `expected`, which stands
    verbatim in the event `event_id`.
    """

    query: str
    answer_prefix: str
    expected: str
    event_id: str

    def is_right(self, answer: str) -> bool:
        """Whether `answer` holds `expected` whole ("7.12" is not in "17.12" nor in "7.125")."""
        return re.search(rf"(?<![\w.]){re.escape(self.expected)}(?!\w|[.,]\d)", answer) is not None


def market_events(seed: int, *, detail: Detail = "short") -> Iterator[MarketEvent]:
    """The endless stream of `seed`, oldest first (it ends with the calendar, in the year 9999).

    The same seed gives the same events, however many are taken, and the same facts for either `detail`:
    "short" texts have 20 to 40 tokens, "
    ""long" ones about 89 on average (SmolLM2's tokenizer), so that 84 of them
    make the 7.2K to 7.7K tokens of the paper's prompts. ValueError for another `detail`.
    """
    if detail not in ("short", "long"):
        raise ValueError(f"detail is {detail!r}; expected 'short' or 'long'")
    return _stream(random.Random(f"market:{seed}"), detail)


def _stream(rng: random.Random, detail: Detail) -> Iterator[MarketEvent]:
    closes = {ticker: first for ticker, _, _, first in _COMPANIES}
    for day in _business_days():
        today: list[MarketEvent] = []
        for ticker, company, line, _ in _COMPANIES:
            price, closes[ticker] = _price(rng, day, ticker, company, closes[ticker], detail)
            today.append(price)
            if rng.random() < _NEWS_RATE:
                today.append(_news(rng, day, ticker, company, line, detail))
            if rng.random() < _FILING_RATE:
                today.append(_filing(rng, day, ticker, company, line, detail))
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
    rng: random.Random, day: datetime.date, ticker: str, company: str, previous: float, detail: Detail
) -> tuple[MarketEvent, float]:
    """The day's price record and the close that the next day starts from."""
    opened = max(10.0, previous * rng.uniform(0.98, 1.02))
    closed = max(10.0, opened * rng.uniform(0.96, 1.0417))
    numbers = {
        "open": f"{opened:.2f}",
        "high": f"{max(opened, closed) * rng.uniform(1.0, 1.02):.2f}",
        "low": f"{min(opened, closed) * rng.uniform(0.98, 1.0):.2f}",
        "close": f"{closed:.2f}",
        "volume": f"{rng.randrange(400_000, 9_000_000):,}",
    }
    if detail == "short":
        text = f"On {day} {company} ({ticker}) closed at {numbers['close']}."
        fields: tuple[tuple[str, str], ...] = (("close", numbers["close"]),)
    else:
        listed = ", ".join(f"{name} {value}" for name, value in numbers.items())
        text = f"Daily price record for {company}, ticker {ticker}, on {day}: {listed}."
        fields = tuple(numbers.items())
    return MarketEvent(f"px-{day}-{ticker}", "price", ticker, day, text, fields), closed


def _news(
    rng: random.Random, day: datetime.date, ticker: str, company: str, line: str, detail: Detail
) -> MarketEvent:
    headline = rng.choice(_HEADLINES).format(
        amount=rng.randrange(12, 990), line=line, place=rng.choice(_PLACES)
    )
    text = f"News on {day}: {company} ({ticker}) {headline}."
    return MarketEvent(f"nw-{day}-{ticker}", "news", ticker, day, text, (("headline", headline),))


def _filing(
    rng: random.Random, day: datetime.date, ticker: str, company: str, line: str, detail: Detail
) -> MarketEvent:
    form, template = rng.choice(_FILINGS)
    title = template.format(amount=rng.randrange(12, 990), line=line, place=rng.choice(_PLACES))
    text = f"Filing on {day}: {company} ({ticker}) form {form}, {title}."
    return MarketEvent(f"fl-{day}-{ticker}", "filing", ticker, day, text, (("form", form), ("title", title)))


def market_question(window: Sequence[MarketEvent], *, seed: int, step: int) -> MarketQuestion:
    """Ask for one field of one observation of `window`, chosen by `seed` and `step`.

    Two calls with the same arguments ask the same. ValueError when nothing in `window` can be asked about
    without two different right answers.
    """
    rng = random.Random(f"market-question:{seed}:{step}")
    event = rng.choice(_askable(window))
    name, value = rng.choice(event.fields)
    company = next(c for t, c, _, _ in _COMPANIES if t == event.ticker)
    return MarketQuestion(
        query=f"\nQuestion: What was the {name} of {company} ({event.ticker}) on {event.date}?\nAnswer:",
        answer_prefix=f" On {event.date} {company} ({event.ticker}) closed at",
        expected=value,
        event_id=event.id,
    )


def copy_question(window: Sequence[MarketEvent], *, seed: int, step: int) -> MarketQuestion:
    """Ask to copy fields of one observation of `window` verbatim (the paper's query); as
    `market_question`."""
    rng = random.Random(f"copy-question:{seed}:{step}")
    event = rng.choice(_askable(window))
    names = " and ".join(name for name, _ in event.fields)
    first, last = event.fields[0][1], event.fields[-1][1]
    start = event.text.index(first)
    return MarketQuestion(
        query=f"\nCopy the {names} of the {event.kind} record of {event.ticker} on {event.date} verbatim.\n",
        answer_prefix=event.text[:start].rstrip(),
        expected=event.text[start : event.text.rindex(last) + len(last)],
        event_id=event.id,
    )


def _askable(window: Sequence[MarketEvent]) -> list[MarketEvent]:
    """The events that no other event of the window contradicts: same channel, company and day, other
    fields."""
    texts: dict[tuple[str, str, datetime.date], set[str]] = {}
    for event in window:
        texts.setdefault((event.kind, event.ticker, event.date), set()).add(event.text)
    askable = [e for e in window if len(texts[e.kind, e.ticker, e.date]) == 1]
    if not askable:
        raise ValueError(
            "the window has no event with one right answer; expected at least one distinct event"
        )
    return askable
