"""Who a process is to its peers: certificates of one authority, for the relay and the control channel."""
