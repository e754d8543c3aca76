"""Learned placement: what a native loader does with canonical tensors, and applying items by it (DESIGN section 5)."""
