"""Kernels compile for GPUs that are not there, and fit them."""

from __future__ import annotations

import os

from tests.engine.kernels.variants import compile_all, every_variant, some_variants

SHARED_MEMORY = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}
"""What one block can have, in bytes (A100, H100 and H200, MI300)."""


def test_variants_compile_and_fit() -> None:
    """ROLLING_KV_COMPILE=all compiles every variant, which takes many minutes, instead of some."""
    everything = os.environ.get("ROLLING_KV_COMPILE") == "all"
    compiled = compile_all(every_variant() if everything else some_variants())
    assert {needs.target for _, found in compiled for needs in found} == set(SHARED_MEMORY)
    for variant, found in compiled:
        assert found, f"{variant}: nothing was launched"
        for needs in found:
            most = SHARED_MEMORY[needs.target]
            assert needs.shared <= most, f"{variant}: {needs} exceeds the {most} bytes of a block"
            # A few spilled registers cost little; hundreds mean blocks too large for the registers.
            assert needs.spilled <= 256, f"{variant}: {needs} spills registers"
