"""Memory of sequences: KV slabs and recurrent states, the views models see of them, the prefix tree, the disk tier."""
