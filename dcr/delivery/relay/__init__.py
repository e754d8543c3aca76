"""Payloads over TCP: from owners to one rollout node each, and from there along a tree (docs/relay.md)."""
