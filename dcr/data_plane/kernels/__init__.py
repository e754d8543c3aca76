"""Kernels over boxes: the same bits from a torch reference on any device and from numba on a CPU (DESIGN section 5)."""
