"""A whole refit on one machine: a small policy trained for real, two engines that serve it, and what was sent."""
