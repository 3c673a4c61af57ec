"""Replay: an agent's requests in other orders, to see whether its answers depend on what came before."""
