"""From tensors to the changed set, to payload bytes, to resident bits: no sockets."""
