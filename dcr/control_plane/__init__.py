"""Where the commit record is kept, and what stands beside it."""
