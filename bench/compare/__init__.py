"""weft beside what a user would pick instead, on the same work in one run."""
