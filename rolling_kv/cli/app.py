"""The commands of `rolling-kv`, one module each."""

from __future__ import annotations

import typer

from rolling_kv.cli.ask import ask
from rolling_kv.cli.bench import app as bench_app
from rolling_kv.cli.demo import demo
from rolling_kv.cli.doctor import doctor
from rolling_kv.cli.profile import profile
from rolling_kv.cli.replay import replay
from rolling_kv.cli.store import app as store_app

app = typer.Typer(
    name="rolling-kv",
    help="Fast, history-independent answers over a rolling window of documents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(ask)
app.command()(doctor)
app.command()(profile)
app.command()(replay)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
