"""Owners inside Megatron-Core trainers, through Megatron Bridge's own conversion."""
