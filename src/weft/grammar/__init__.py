"""Which tokens may come next: grammars compiled and matched, thinking counted, masks for a step. Knows no model, no mlx."""
