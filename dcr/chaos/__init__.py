"""Scripted faults of real processes, and checks that no bit was lost; docs/chaos.md."""
