"""Receivers inside real serving runtimes."""
