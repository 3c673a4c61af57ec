"""The check that needs a GPU: `scripts/gpu-check`."""
