"""The imperative shell: processes that carry out the effects of the protocol roles."""
