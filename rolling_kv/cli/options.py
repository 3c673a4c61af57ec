"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from rolling_kv.config import DEFAULT_CONDITIONING, DEFAULT_POLICY, DEFAULT_RATIO
from rolling_kv.policies import POLICIES

ModelOption = Annotated[
    str, typer.Option("--model", help="A model folder, a hub id, demo, smollm2 or gemma3-270m.")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", help=f"Which stored tokens to recompute: {', '.join(POLICIES)}.")
]
RatioOption = Annotated[float, typer.Option("--ratio", help="How many of them, from 0 (none) to 1 (all).")]
ConditioningOption = Annotated[
    str,
    typer.Option(
        "--conditioning", help="What stored KV has seen: isolated, instruction or window:<documents>."
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

__all__ = [
    "DEFAULT_CONDITIONING",
    "DEFAULT_POLICY",
    "DEFAULT_RATIO",
    "ConditioningOption",
    "DeviceOption",
    "DocumentsOption",
    "DtypeOption",
    "JsonOption",
    "ModelOption",
    "PolicyOption",
    "RatioOption",
]
