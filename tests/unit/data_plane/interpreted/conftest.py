"""What runs in Triton's interpreter runs in a process of its own, see ``test_triton.py``."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # strategies and models of the folder above
