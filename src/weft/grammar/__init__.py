"""Which tokens may come next: grammars compiled and matched, reasoning budgets, masks for a step. Knows no model, no mlx."""
