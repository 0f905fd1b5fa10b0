"""A simulated cluster: the real scheduler, fairness, prefix tree, in-flight tables, dispatcher and router on a virtual clock."""
