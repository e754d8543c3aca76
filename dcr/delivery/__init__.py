"""Payload bytes from owners to rollout nodes."""
