"""Options that several commands share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from rolling_kv.config import DEFAULT_CONDITIONING, DEFAULT_FRESH_TAIL, DEFAULT_POLICY, DEFAULT_RATIO
from rolling_kv.policies import POLICIES

ModelOption = Annotated[
    str, typer.Option("--model", help="A model folder, a hub id, demo, smollm2 or gemma3-270m.")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", help=f"Which stored tokens to recompute: {', '.join(POLICIES)}.")
]
RatioOption = Annotated[
    float | None,
    typer.Option(
        "--ratio",
        help=f"How many of them, from 0 (none) to 1 (all). Default: {DEFAULT_RATIO}, under a policy that "
        "recomputes.",
    ),
]
ConditioningOption = Annotated[
    str,
    typer.Option(
        "--conditioning", help="What stored KV has seen: isolated, instruction, window:<documents> or full."
    ),
]
FreshTailOption = Annotated[
    int | None,
    typer.Option(
        "--fresh-tail",
        help="So many of the newest documents are computed in every call, not stored. Default: "
        f"{DEFAULT_FRESH_TAIL} under window:<documents>, otherwise 0.",
    ),
]
DocumentsOption = Annotated[
    str, typer.Option("--documents", help="Of a request: a number, or a range such as 16-32.")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16; auto is what is fast here.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:<number>.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_ARGUMENTS = "|".join(
    (
        *("model", "policy", "ratio", "conditioning", "fresh_tail", "dtype", "device"),
        *("store", "namespace", "instruction"),
        *("window", "window_tokens", "answer_prefix", "max_new_tokens", "stop", "temperature", "seed"),
    )
)


def as_options(message: str) -> str:
    """`message` with Python's arguments as this command line has them: `--window 3` for `window=3`.

    A name is taken for an argument where it is followed by `=`, begins the message, or holds an underscore.
    """
    text = re.sub(rf"\b({_ARGUMENTS})=None\b", r"no --\1", message)
    text = re.sub(rf"\b({_ARGUMENTS})=(['\"]?)([\w.:/-]+)\2", r"--\1 \3", text)
    text = re.sub(rf"\b({_ARGUMENTS})=", r"--\1", text)
    text = re.sub(rf"(^|: |; )({_ARGUMENTS})(?= (?:= |is '?[\d-]))", r"\1--\2", text)
    text = re.sub(r"(?<!-)\b(window_tokens|answer_prefix|max_new_tokens|fresh_tail)\b", r"--\1", text)
    return re.sub(r"--(\w+)", lambda found: f"--{found[1].replace('_', '-')}", text)


__all__ = [
    "DEFAULT_CONDITIONING",
    "DEFAULT_POLICY",
    "ConditioningOption",
    "DeviceOption",
    "DocumentsOption",
    "DtypeOption",
    "FreshTailOption",
    "JsonOption",
    "ModelOption",
    "PolicyOption",
    "RatioOption",
    "as_options",
]
