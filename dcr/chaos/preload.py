"""What every child needs and what takes seconds to load: loaded once, in the process that children are forked from.

No thread may be left running here, for a fork takes none along: torch has one, and those of the kernels start anew.
"""

import torch
import torch._dynamo  # torch imports it at the first operation that it wraps
import torch.distributed

from dcr.chaos import child, coordinator_child, node_child, trainer_child
from dcr.chaos.lifetime import end_with_parent
from dcr.data_plane.kernels.choice import kernels_for

LOADED = (child, coordinator_child, node_child, trainer_child)

torch.set_num_threads(1)
kernels_for([])
end_with_parent()  # of the harness; a child that is stopped would keep this process, and so itself, for ever
