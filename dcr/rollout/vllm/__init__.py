"""Receivers inside vLLM engines."""
