// Recurrent layers as operations of MLX's graph, and the choice of a row's own state among those after each token.
//
// Included by primitives.cpp, which has what the weights of layers are kept in.
#pragma once

namespace weft {

weft_series series(const mx::array& x, size_t heads) {  // (B, T, heads, n)
  const size_t n = x.size() / (size_t(x.shape(0)) * x.shape(1) * heads), tokens = x.shape(1);
  return {x.data<float>(), tokens * heads * n, heads * n, n};
}

// Outputs (B, T, heads, height) and states (B, heads, height, width), or with `keeps` (B, T, heads, height, width), as two
// outputs of one operation. value (B, T, heads, height), key and query (B, T, heads / groups, width), gate (B, T, heads, 1 or
// width), beta (B, T, heads, 1).
std::vector<mx::array> recur(const mx::array& state, const mx::array& value, const mx::array& key, const mx::array& query,
                             const mx::array& gate, Optional beta, bool keeps) {
  Arrays inputs{state, value, key, query, gate};
  if (beta) inputs.push_back(*beta);
  for (const auto& input : inputs) require(input.ndim() == 4 && input.dtype() == mx::float32, "four axes of float32");
  const size_t rows = state.shape(0), heads = state.shape(1), height = state.shape(2), width = state.shape(3);
  const size_t tokens = key.shape(1), groups = heads / key.shape(2);
  require(width % WEFT_LANES == 0 && height % WEFT_STATE_ROWS == 0, "a state has whole lanes");
  require(heads % key.shape(2) == 0 && query.shape() == key.shape() && size_t(key.shape(3)) == width, "keys are as wide as a state");
  const auto of_token = [&](const mx::array& x, size_t last) {
    return size_t(x.shape(0)) == rows && size_t(x.shape(1)) == tokens && size_t(x.shape(2)) == heads && size_t(x.shape(3)) == last;
  };
  require(size_t(key.shape(0)) == rows && of_token(value, height), "values are as high as a state");
  require(of_token(gate, 1) || of_token(gate, width), "gates belong to a head or to each of its numbers");
  require(!beta || of_token(*beta, 1), "betas belong to a head");
  auto states = state.shape();
  if (keeps) states.insert(states.begin() + 1, static_cast<int>(tokens));
  auto work = [=](const Arrays& in, Arrays& out) {
    const weft_recurrence one{rows, heads, groups, tokens, height, width, series(in[1], heads), series(in[2], heads / groups),
                              series(in[3], heads / groups), series(in[4], heads), in.size() > 5 ? series(in[5], heads) : weft_series{},
                              width > 1 && size_t(in[4].shape(3)) == width, in[0].data<float>(), out[1].data<float>(), keeps,
                              out[0].data<float>(), tokens};
    weft_recur(&one);
  };
  return mx::array::make_arrays({value.shape(), states}, {mx::float32, mx::float32},
                                std::make_shared<Operation>("weft.recur", std::move(work)), inputs);
}

// What a gated delta layer has beside its two products.
class DeltaLayer {
 public:
  // convolution (channels, taps, 1), rate and bias (heads).
  DeltaLayer(const mx::array& convolution, const mx::array& rate, const mx::array& bias, NormPointer query_norm, NormPointer key_norm,
             NormPointer norm)
      : held_{turned(convolution), settled(mx::astype(rate, mx::float32)), settled(mx::astype(bias, mx::float32))},
        norms_{query_norm, key_norm, norm} {
    const size_t channels = held_[0].shape(1), heads = held_[1].size(), values = heads * norm->size(), width = key_norm->size();
    require(held_[2].size() == heads && query_norm->size() == width && query_norm->eps == key_norm->eps, "rates, biases and norms belong together");
    require(channels > values && (channels - values) % (2 * width) == 0, "channels are those of queries, keys and values");
    layer_ = {(channels - values) / 2 / width, heads, width, norm->size(), size_t(held_[0].shape(0)), held_[0].data<float>(),
              query_norm->weight(), key_norm->weight(), held_[1].data<float>(), held_[2].data<float>(), norm->weight(), key_norm->eps, norm->eps};
    require(layer_.taps > 1 && layer_.taps <= WEFT_MAX_TAPS, "a convolution has two taps or more");
    require(width % WEFT_LANES == 0 && layer_.height % WEFT_STATE_ROWS == 0, "a state has whole lanes");
    require(heads % layer_.key_heads == 0, "heads share heads of keys evenly");
  }
  const weft_delta_layer* get() const { return &layer_; }
  size_t channels() const { return held_[0].shape(1); }
  size_t line_width() const { return channels() + layer_.heads * (layer_.height + 2); }

 private:
  static mx::array turned(const mx::array& convolution) {
    require(convolution.ndim() == 3 && convolution.shape(2) == 1, "every channel has taps of its own");
    return settled(mx::contiguous(mx::transpose(mx::squeeze(mx::astype(convolution, mx::float32), 2))));
  }

  Arrays held_;
  std::vector<NormPointer> norms_;
  weft_delta_layer layer_{};
};

// Checks the channels before a gated delta layer's new tokens and its states, and returns the shapes of both behind these tokens: channels of
// the last tokens (B, taps - 1, channels) and the state (B, heads, height, width); with `keeps` the channels of those before and all new
// tokens (B, taps - 1 + T, channels) and the states after each token (B, T, heads, height, width).
std::vector<mx::Shape> delta_shapes(const DeltaLayer& layer, const mx::array& columns, const mx::array& state, int rows, int tokens, bool keeps) {
  const weft_delta_layer& its = *layer.get();
  const int before = static_cast<int>(its.taps) - 1, channels = static_cast<int>(layer.channels());
  require(columns.dtype() == mx::float32 && state.dtype() == mx::float32, "states are float32");
  require(columns.shape() == mx::Shape({rows, before, channels}), "the channels before are those of each row");
  require(state.shape() == mx::Shape({rows, int(its.heads), int(its.height), int(its.width)}), "every row has its state");
  if (!keeps) return {columns.shape(), state.shape()};
  return {{rows, before + tokens, channels}, {rows, tokens, int(its.heads), int(its.height), int(its.width)}};
}

// A gated delta layer between its products: lines (B, T, line) -> output (B, T, heads * height), and channels and states behind them.
std::vector<mx::array> delta(const mx::array& lines, const mx::array& columns, const mx::array& state, const Handle<DeltaLayer>& layer, bool keeps) {
  const weft_delta_layer& its = *layer->get();
  require_numbers(lines, layer->line_width());
  require(lines.ndim() == 3, "three axes of float32");
  const int rows = lines.shape(0), tokens = lines.shape(1);
  auto shapes = delta_shapes(*layer, columns, state, rows, tokens, keeps);
  shapes.insert(shapes.begin(), {rows, tokens, int(its.heads * its.height)});
  auto work = [layer, keeps, rows, tokens](const Arrays& in, Arrays& out) {
    const struct weft_delta one{layer->get(), size_t(rows), size_t(tokens), size_t(tokens), in[0].data<float>(), in[1].data<float>(), in[2].data<float>(),
                                out[2].data<float>(), out[1].data<float>(), keeps, out[0].data<float>()};
    weft_delta(&one);
  };
  return mx::array::make_arrays(std::move(shapes), {mx::float32, mx::float32, mx::float32},
                                std::make_shared<Operation>("weft.delta", std::move(work)), {lines, columns, state});
}

// Of each row of arrays (B, N, ...) the entries from its own start on, copied: of array i from starts[i][row] on as many as counts[i],
// (B, count, ...), or one entry as (B, ...). All are outputs of one operation.
std::vector<mx::array> windows(const Arrays& arrays, std::vector<std::vector<size_t>> starts, std::vector<std::optional<size_t>> counts) {
  require(!arrays.empty() && starts.size() == arrays.size() && counts.size() == arrays.size(), "every array has its starts");
  std::vector<mx::Shape> shapes;
  for (size_t i = 0; i < arrays.size(); i++) {
    const auto& x = arrays[i];
    require(x.ndim() >= 2 && x.dtype() == mx::float32 && size_t(x.shape(0)) == starts[i].size(), "every row has its start");
    for (const size_t start : starts[i]) require(start + counts[i].value_or(1) <= size_t(x.shape(1)), "entries are those of the row");
    shapes.push_back(x.shape());
    if (counts[i])
      shapes[i][1] = static_cast<int>(*counts[i]);
    else
      shapes[i].erase(shapes[i].begin() + 1);
  }
  auto work = [starts = std::move(starts), counts = std::move(counts)](const Arrays& in, Arrays& out) {
    for (size_t i = 0; i < in.size(); i++) {
      const size_t rows = starts[i].size(), row = in[i].size() / rows, entry = row / in[i].shape(1), count = counts[i].value_or(1);
      for (size_t at = 0; at < rows; at++)
        std::memcpy(out[i].data<float>() + at * count * entry, in[i].data<float>() + at * row + starts[i][at] * entry, count * entry * sizeof(float));
    }
  };
  return mx::array::make_arrays(std::move(shapes), std::vector<mx::Dtype>(arrays.size(), mx::float32),
                                std::make_shared<Operation>("weft.windows", std::move(work)), arrays);
}

// Of each row of x (B, N, ...) the entries moved on by those of `last` (B, T, ...), which come to the end; in place where nobody else looks at x.
mx::array shift(const mx::array& x, const mx::array& last) {
  require(x.ndim() >= 2 && x.ndim() == last.ndim() && x.dtype() == mx::float32 && last.dtype() == mx::float32, "rows of float32");
  for (size_t axis = 0; axis < x.ndim(); axis++) require(axis == 1 || x.shape(axis) == last.shape(axis), "entries have one shape");
  require(last.shape(1) <= x.shape(1), "a row has as many entries as come, or more");
  auto work = [](const Arrays& in, Arrays& out) {
    const size_t rows = in[1].shape(0), row = out[0].size() / rows, moved = in[1].size() / rows;
    for (size_t i = 0; i < rows; i++) {
      float* to = out[0].data<float>() + i * row;
      std::memmove(to, to + moved, (row - moved) * sizeof(float));
      std::memcpy(to + row - moved, in[1].data<float>() + i * moved, moved * sizeof(float));
    }
  };
  return operation("weft.shift", x.shape(), {x, last}, std::move(work), true);
}

mx::array window(const mx::array& x, std::vector<size_t> starts, std::optional<size_t> count) { return windows({x}, {std::move(starts)}, {count})[0]; }

}  // namespace weft
