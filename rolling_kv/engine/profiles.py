"""Profiles: what was measured of one model, kept by its fingerprint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolling_kv.engine.demo_models import cache_root
from rolling_kv.errors import ProfileError

_SHIPPED = Path(__file__).parent / "shipped_profiles"  # of the demo models


class ModelProfile(BaseModel):
    """The part of a profile that calls use; layers are 0-based.

    Args:
        model: the model's fingerprint, the same in every dtype (`ModelIdentity.values`).
        name: how it was opened, for people.
        critical_layers: best first, by Recall@10%.
        sink_token_ids, sink_layer: see `ModelTraits`.
        measured: how, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    model: str = Field(pattern=r"^[0-9a-f]{32}$")
    name: str
    critical_layers: tuple[int, ...] = Field(min_length=1)
    sink_token_ids: tuple[int, ...] = ()
    sink_layer: int | None = Field(default=None, ge=1)
    measured: str = ""


def profile_path(fingerprint: str) -> Path:
    """Where the profile of that model is kept: in the cache folder of the user."""
    return cache_root() / "profiles" / f"{fingerprint}.json"


def read_profile(fingerprint: str, *, layers: int) -> ModelProfile | None:
    """The user's own profile of that model, else the one that ships with the package, else None.

    Raises:
        ProfileError: the file is damaged, or of another model.
    """
    for path in (profile_path(fingerprint), _SHIPPED / f"{fingerprint}.json"):
        if path.is_file():
            return _read(path, fingerprint=fingerprint, layers=layers)
    return None


def write_profile(profile: ModelProfile) -> Path:
    """Keeps `profile`, in place of an earlier one; a reader sees the old file or the new one, whole."""
    path = profile_path(profile.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        written.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
    return path


def _read(path: Path, *, fingerprint: str, layers: int) -> ModelProfile:
    advice = "Delete it, or measure it again with `rolling-kv profile`."
    try:
        profile = ModelProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError) as error:
        raise ProfileError(f"The profile {path} cannot be read: {error}. {advice}") from error
    named = (*profile.critical_layers, *([] if profile.sink_layer is None else [profile.sink_layer]))
    if profile.model != fingerprint or not all(0 <= layer < layers for layer in named):
        raise ProfileError(f"The profile {path} is not of a model with {layers} layers. {advice}")
    return profile
