"""Owners inside plain torch trainers: any module of plain tensors and DTensors."""
