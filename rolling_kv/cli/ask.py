"""`rolling-kv ask`: one question over documents from files, folders or standard input."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rolling_kv.answer import Answer
from rolling_kv.cli.options import (
    DEFAULT_CONDITIONING,
    DEFAULT_POLICY,
    ConditioningOption,
    DeviceOption,
    DtypeOption,
    FreshTailOption,
    JsonOption,
    ModelOption,
    PolicyOption,
    RatioOption,
)
from rolling_kv.cli.output import errors, print_json, progress_bar
from rolling_kv.errors import ConfigError
from rolling_kv.session import RollingSession

_SUFFIXES = (".txt", ".md")


def ask(
    question: Annotated[str, typer.Argument(help="What to ask; it stands after the documents.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders (their .txt and .md files by name), or - for standard input, which is also "
            "read when nothing is given and it is not a terminal.",
        ),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Every line of a file is a document.")] = False,
    instruction: Annotated[str, typer.Option(help="Stands before the documents.")] = "",
    window: Annotated[int | None, typer.Option(help="Documents at most, the newest.")] = None,
    window_tokens: Annotated[int | None, typer.Option(help="Document tokens at most.")] = None,
    answer_prefix: Annotated[str, typer.Option(help="The answer begins with this text.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer at most.")] = 128,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, more draws.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    store: Annotated[Path | None, typer.Option(help="Folder that keeps KV for the next time.")] = None,
    namespace: Annotated[str, typer.Option(help="Keeps KV apart from other namespaces'.")] = "default",
    model: ModelOption = "demo",
    policy: PolicyOption = DEFAULT_POLICY,
    ratio: RatioOption = None,
    conditioning: ConditioningOption = DEFAULT_CONDITIONING,
    fresh_tail: FreshTailOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answers a question over documents.

    With --store, documents that were asked about before are not computed again, but for the newest
    (--fresh-tail).
    """
    named = read_documents(documents or [], lines=lines)
    with progress_bar() as progress:
        session = RollingSession.open(
            model=model,
            instruction=instruction,
            window=window,
            window_tokens=window_tokens,
            policy=policy,
            ratio=ratio,
            conditioning=conditioning,
            fresh_tail=fresh_tail,
            store=store,
            namespace=namespace,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    with session:
        with progress_bar() as progress:
            changes = session.extend(
                [text for _, text in named],
                ids=[name for name, _ in named],
                progress=lambda done, total: progress("reading documents", done / max(total, 1)),
            )
        computed = sum(change.computed for change in changes)
        stream = session.stream(
            question,
            max_new_tokens=max_new_tokens,
            answer_prefix=answer_prefix,
            stop=stop or (),
            temperature=temperature,
            seed=seed,
        )
        for piece in stream:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        answer = stream.answer
        held = [document.id for document in session.documents]
    if as_json:
        evicted = [name for change in changes for name in change.evicted]
        ingest = {"computed": computed, "evicted": evicted}
        print_json({**answer.to_dict(), "documents": held, "ingest": ingest})
        return
    sys.stdout.write("\n")
    errors.print(_account(answer, documents=len(held), computed=computed), style="dim", highlight=False)
    for reason in answer.usage.degraded:
        errors.print(f"degraded: {reason}", style="yellow", highlight=False, markup=False)


def read_documents(sources: list[str], *, lines: bool) -> list[tuple[str, str]]:
    """Names and texts of the documents in `sources`, in the order given; names are unique.

    Raises:
        ConfigError: a source is missing, is not text, or holds no document.
    """
    if not sources and not sys.stdin.isatty():
        sources = ["-"]
    found: list[tuple[str, str]] = []
    for source in sources:
        if source == "-":
            found += _split("stdin", _read_stdin(), lines=lines)
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix.lower() in _SUFFIXES and p.is_file())
        elif path.is_file():
            files = [path]
        else:
            raise ConfigError(
                f"There is no file or folder {source!r}. Give files, folders, or - for standard input."
            )
        for file in files:
            found += _split(str(file), _read(file), lines=lines)
    if not found:
        raise ConfigError(
            "There is no document to ask about: the sources hold no text. Give text files, folders with "
            ".txt or .md files, or - for standard input."
        )
    return _unique(found)


def _read_stdin() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale is
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is not UTF-8 text ({error}). Convert it first.") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}). Convert it, or leave it out.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _split(name: str, text: str, *, lines: bool) -> list[tuple[str, str]]:
    if not lines:
        return [(name, text)] if text.strip() else []
    numbered = enumerate(text.splitlines(), start=1)
    return [(f"{name}:{number}", line) for number, line in numbered if line.strip()]


def _unique(named: list[tuple[str, str]]) -> list[tuple[str, str]]:
    seen: dict[str, int] = {}
    unique = []
    for name, text in named:
        seen[name] = seen.get(name, 0) + 1
        unique.append((name if seen[name] == 1 else f"{name} ({seen[name]})", text))
    return unique


def _account(answer: Answer, *, documents: int, computed: int) -> str:
    usage = asdict(answer.usage)
    parts = ", ".join(f"{usage[part]} {part}" for part in ("prefix", "reused", "recomputed", "computed"))
    return (
        f"{documents} documents, {computed} tokens computed to store them; prompt of "
        f"{usage['prompt_tokens']} tokens: {parts}; first token after {answer.timing.ttft:.2f} s, "
        f"{usage['output']} tokens in {answer.timing.total:.2f} s"
    )
