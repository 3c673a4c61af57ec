"""The transformers host: every pass is one call of the whole model with only the rows to compute."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from rolling_kv.engine import interception
from rolling_kv.engine.ahead import Ahead
from rolling_kv.engine.buffers import Buffers
from rolling_kv.engine.families import require_supported, sliding_window_of
from rolling_kv.engine.fingerprint import model_fingerprint
from rolling_kv.engine.kernels import key_deviation, scatter_rows
from rolling_kv.engine.layer_shapes import layer_shapes
from rolling_kv.engine.profiles import read_profile
from rolling_kv.engine.rope import rope_of
from rolling_kv.engine.stitch import PlacedKV, StitchedKV
from rolling_kv.engine.tokenizer import ModelTokenizer
from rolling_kv.engine.traits import traits_of, with_critical_layers
from rolling_kv.errors import NumericsError
from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.turns import Turns

Clock = Callable[[], float]

_ROWS = 2048
"""Of a pass for deviations at once: what it computes in between stays small, and its attention dense."""


class PassInterrupted(Exception):
    """A pass was given up because somebody waits for the model; nothing of it is kept."""


class _LayerReached(Exception):
    """Ends a pass once the last layer that it is about has been seen."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """What a pass computes.

    Args:
        rows: [rows], positions, ascending.
        positions: [keys], of what they may see, ascending; None for 0, 1, 2, ...
        last_layer: where the pass ends, which is with that layer's queries, keys and values; None: with
            logits.
    """

    rows: torch.Tensor
    positions: torch.Tensor | None
    last_layer: int | None


class TransformersHost:
    """Runs passes of one transformers model. Several sessions may share it; passes take turns.

    Args:
        model: a causal language model of a supported family; its attention is taken over by the host.
        tokenizer: the model's tokenizer.
        name: how errors call the model.
        critical_layers: 0-based, best first, instead of those that are known of it.

    Raises:
        UnsupportedModelError: its family, rope, heads or tokenizer is not supported.
        ProfileError: its stored profile is damaged.
        ConfigError: `critical_layers` are no layers of it.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str, critical_layers: Sequence[int] = ()) -> None:
        config = model.config
        require_supported(config.model_type, name=name)
        self.name = name
        self.tokenizer = ModelTokenizer(tokenizer, name=name)
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.max_positions: int = config.max_position_embeddings
        self.sliding_window: int | None = sliding_window_of(config)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.rope = rope_of(model, name=name, head_dim=self.head_dim)
        self._model = model
        self.layer_shapes = layer_shapes(model, head_dim=self.head_dim)
        self.on_pass: Callable[[PassShape], None] | None = None  # told of every pass before it runs
        self._turns = Turns()
        self._ahead = Ahead(self.device)
        self._buffers = Buffers()
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        )
        interception.register()
        model.set_attn_implementation(interception.ATTENTION_NAME)
        self.identity = ModelIdentity(
            name=name,
            model=model_fingerprint(model),
            tokenizer=self.tokenizer.fingerprint,
            rope=self.rope.fingerprint,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device.type,
        )
        self.traits = traits_of(config, read_profile(self.identity.values, layers=self.layers))
        if critical_layers:
            self.traits = with_critical_layers(self.traits, critical_layers, layers=self.layers)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        declared = self._model.generation_config.eos_token_id
        ids = declared if isinstance(declared, list) else [declared, self.tokenizer.eos_id]
        return frozenset(token for token in ids if token is not None)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the keys and values of a token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Of the model's parameters, those that are shared once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())

    @property
    def wanted(self) -> bool:
        """Whether a request waits for a pass to end."""
        return self._turns.wanted

    def synchronize(self) -> None:
        """Waits until the device has done what it was given, so that a clock tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def stitch(
        self,
        placed: Sequence[PlacedKV],
        *,
        capacity: int,
        packed: bool = False,
        ahead: bool = False,
        clock: Clock = time.perf_counter,
    ) -> StitchedKV:
        """The stored segments at their request positions, in buffers of `capacity` slots.

        Args:
            ahead: a layer is filled while the one before it is computed.
        """
        return StitchedKV(
            placed,
            capacity=capacity,
            rope=self.rope,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            buffers=self._buffers,
            packed=packed,
            ahead=self._ahead if ahead else None,
            clock=clock,
        )

    def extend(
        self,
        context: Sequence[SegmentKV],
        token_ids: Sequence[int],
        *,
        start: int | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> SegmentKV:
        """The canonical pass: one segment's KV, computed after `context`, at the positions of its own path.

        Its shape depends on the lengths of `context` and `token_ids` alone, so the same lineage gives the
        same bits whatever else was computed, or stored, before or together with it.

        Args:
            context: each where it was computed, ascending.
            start: of the segment; by default right behind the context.
            interrupted: asked at every layer; when it is true the pass is given up.

        Raises:
            PassInterrupted
        """
        seen = sum(len(segment) for segment in context)
        first = seen if start is None else start
        stop = seen + len(token_ids)
        placed = [PlacedKV(kv=segment, position=segment.start) for segment in context]
        stitched = self.stitch(placed, capacity=stop, packed=True)
        rows = torch.arange(first, first + len(token_ids), device=self.device)
        self.run(
            token_ids,
            rows=rows,
            stitched=stitched,
            stop=stop,
            slots=torch.arange(seen, stop, device=self.device),
            positions=None if first == seen else torch.cat((stitched.positions, rows)),
            last_layer=self.layers - 1,
            interrupted=interrupted,
        )
        layers = [stitched.layer(index) for index in range(self.layers)]
        return SegmentKV(
            k=torch.stack([keys[0, :, seen:stop] for keys, _ in layers]),
            v=torch.stack([values[0, :, seen:stop] for _, values in layers]),
            token_ids=tuple(token_ids),
            start=first,
        )

    def cut(self, stitched: StitchedKV, token_ids: Sequence[int], *, start: int) -> SegmentKV:
        """A copy of the KV of the tokens at `start` and after it, as it stands."""
        stop = start + len(token_ids)
        layers = [stitched.layer(index) for index in range(self.layers)]
        return SegmentKV(
            k=torch.stack([keys[0, :, start:stop] for keys, _ in layers]),
            v=torch.stack([values[0, :, start:stop] for _, values in layers]),
            token_ids=tuple(token_ids),
            start=start,
        )

    def view(
        self, stitched: StitchedKV, layer: int, *, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer from `start` to `stop`, each [kv_heads, tokens, head_dim]: views."""
        keys, values = stitched.layer(layer)
        return keys[0, :, start:stop], values[0, :, start:stop]

    def deviations(
        self,
        stitched: StitchedKV,
        token_ids: Sequence[int],
        *,
        rows: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """d_i = |K_i(current) - K_i(stored)|^2 at `layer`, for the positions `rows`, ascending.

        Runs those rows up to the layer's keys, in blocks, and leaves what it computed in `stitched`: up to
        the selection layer their KV is fresh (Yao et al., 2025, section 4; LMCache's selection).

        Returns:
            [rows], float32. Positions that were not stored deviate from zero keys.
        """
        rows = rows.to(self.device)
        stored = stitched.stored_keys(layer)[0, :, rows]  # also where an earlier pass wrote over them
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            ids = [token_ids[row] for row in some.tolist()]
            self.run(ids, rows=some, stitched=stitched, stop=int(some[-1]) + 1, last_layer=layer)
        return key_deviation(stitched.layer(layer)[0][0], stored, rows=rows)

    def fuse(self, stitched: StitchedKV, token_ids: Sequence[int], *, rows: torch.Tensor) -> torch.Tensor:
        """Recomputes `rows` (ascending; the last position among them) over the stitched KV, in place.

        Returns:
            The logits after the last token, [vocabulary], float32.
        """
        ids = [token_ids[row] for row in rows.tolist()]
        return self.run(ids, rows=rows.to(self.device), stitched=stitched, stop=len(token_ids))[-1]

    def follow(self, stitched: StitchedKV, token_ids: Sequence[int], *, position: int) -> torch.Tensor:
        """Runs tokens that follow the prompt, the first at `position`.

        Returns:
            The logits after each, [tokens, vocabulary], float32.
        """
        stop = position + len(token_ids)
        rows = torch.arange(position, stop, device=self.device)
        return self.run(token_ids, rows=rows, stitched=stitched, stop=stop, keep=len(token_ids))

    def stock_prefill(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Full prefill by the stock forward of transformers, with its own attention (sdpa) and cache.

        Returns:
            The logits after the last token, [vocabulary], float32, and the cache for `stock_follow`.
        """
        cache = DynamicCache(config=self._model.config)
        return self._stock(token_ids, cache, keep=1)[-1], cache

    def stock_follow(self, cache: Any, token_ids: Sequence[int]) -> torch.Tensor:
        """Runs tokens after a stock prefill; the logits after each, [tokens, vocabulary], float32."""
        return self._stock(token_ids, cache, keep=len(token_ids))

    def run(
        self,
        token_ids: Sequence[int],
        *,
        rows: torch.Tensor,
        stitched: StitchedKV,
        stop: int,
        slots: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        on_query: interception.OnQuery | None = None,
        last_layer: int | None = None,
        keep: int = 1,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """One call of the model for some rows, whose KV is scattered into `stitched`.

        Args:
            token_ids, rows: the tokens to compute and their positions, ascending.
            stop: attention sees the slots before it.
            slots: where the rows' KV goes; their positions by default.
            positions: of the slots before `stop`, ascending; None for 0, 1, 2, ...
            on_query: looks at every layer's queries.
            last_layer: the pass ends with the keys of this layer, or with its queries when somebody looks.
            keep: how many of the last rows' logits are computed.
            interrupted: asked at every layer; when it is true the pass is given up.

        Returns:
            The logits of the last rows, [keep, vocabulary], float32; empty when the pass ended early.
        """
        targets = rows if slots is None else slots

        def update(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if interrupted is not None and interrupted():
                raise PassInterrupted
            all_keys, all_values = stitched.layer(layer)
            scatter_rows(keys, values, keys=all_keys, values=all_values, slots=targets)
            if layer == last_layer and on_query is None:
                raise _LayerReached
            return all_keys[:, :, :stop], all_values[:, :, :stop]

        def look(layer: int, query: torch.Tensor, scaling: float, sliding_window: int | None) -> None:
            assert on_query is not None
            on_query(layer, query, scaling, sliding_window)
            if layer == last_layer:
                raise _LayerReached

        view = interception.PassView(
            rows=rows, positions=positions, on_query=None if on_query is None else look
        )
        with self._turn(interrupted), torch.inference_mode():
            if self.on_pass is not None:
                self.on_pass(PassShape(rows, positions, last_layer))
            try:
                output = self._model(
                    input_ids=torch.tensor([list(token_ids)], device=self.device),
                    position_ids=rows[None],
                    use_cache=True,
                    logits_to_keep=keep,
                    rolling=view,
                    **{self._cache_argument: interception.PassCache(update)},
                )
            except _LayerReached:
                return torch.empty(0)
            return self._finite(output.logits[0].float())

    @contextmanager
    def _turn(self, interrupted: Callable[[], bool] | None) -> Iterator[None]:
        """A pass's turn; no request makes way for one that can be given up."""
        if interrupted is None:
            with self._turns.request():
                yield
            return
        with self._turns.background(give_up=interrupted) as taken:
            if not taken:
                raise PassInterrupted
            yield

    def _finite(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`, when they are numbers.

        Raises:
            NumericsError
        """
        if bool(logits.isnan().any()):
            raise NumericsError(
                f"The model {self.name!r} in {self.identity.dtype} gave logits that are not numbers. Open it "
                "with dtype='float32' or 'bfloat16'."
            )
        return logits

    def _stock(self, token_ids: Sequence[int], cache: Any, *, keep: int) -> torch.Tensor:
        with self._turns.request(), torch.inference_mode(), self._stock_attention():
            if self.on_pass is not None:
                first = cache.get_seq_length()
                self.on_pass(PassShape(torch.arange(first, first + len(token_ids)), None, None))
            output = self._model(
                input_ids=torch.tensor([list(token_ids)], device=self.device),
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_argument: cache},
            )
            return self._finite(output.logits[0].float())

    @contextmanager
    def _stock_attention(self) -> Iterator[None]:
        self._model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            self._model.set_attn_implementation(interception.ATTENTION_NAME)
