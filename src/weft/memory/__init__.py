"""Memory of the rows: what a layer must remember, where it lives, and how a model sees it."""
