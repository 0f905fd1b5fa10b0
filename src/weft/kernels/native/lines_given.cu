// Before product_few.cu: its lines are those of x.
const int num_lines = x_shape[0], width = x_shape[1];
auto prepare_lines = [&]() -> const T* { return x; };
