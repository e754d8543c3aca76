"""Settings of every test."""

import os

from hypothesis import settings

# Nothing is fetched, vLLM takes 1 GiB for its cache and compiles nothing: set before any test imports it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# No deadline: how long an example takes says nothing on a busy machine.
settings.register_profile("dcr", deadline=None, print_blob=True)
settings.load_profile("dcr")
