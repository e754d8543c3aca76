"""Delta-compressed refit: policy updates from a training cluster to running rollout engines, bit for bit."""
