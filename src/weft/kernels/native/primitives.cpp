// weft.kernels._primitives: the functions of weft.h as operations of MLX's graph, for Python.
//
// Functions build lazy nodes of the graph, except those that end in `compute_now`, which compute in the calling thread. Shapes are
// checked here, because the kernels trust them.
// Weights are handed over once, evaluated, and are not nodes of the graph: a step would otherwise visit them all.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>

#include "mlx/transforms.h"
#include "operation.h"
#include "weft.h"

namespace nb = nanobind;

namespace weft {

using Optional = std::optional<mx::array>;

size_t lines_of(const mx::array& x) { return x.size() / x.shape(-1); }

mx::Shape with_last(mx::Shape shape, size_t last) {
  shape.back() = static_cast<int>(last);
  return shape;
}

weft_kind kind_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return WEFT_F32;
  if (dtype == mx::float16) return WEFT_F16;
  require(dtype == mx::bfloat16, "numbers must be float32, float16 or bfloat16");
  return WEFT_BF16;
}

mx::array settled(mx::array x) {
  x.eval();
  if (x.flags().row_contiguous) return x;
  x = mx::contiguous(x);
  x.eval();
  return x;
}

// A matrix (n, k) of weights as the file has them, or several of one shape, (experts, n, k).
class Weights {
 public:
  Weights(mx::array codes, Optional scales, Optional biases, const std::string& mode, size_t bits, size_t group, Optional bias)
      : held_{settled(std::move(codes))} {
    const auto& shape = held_[0].shape();
    require(shape.size() == 2 || shape.size() == 3, "weights have two or three axes");
    experts_ = shape.size() == 3 ? shape[0] : 1;
    weights_.n = shape[shape.size() - 2];
    if (!scales) {
      weights_.kind = kind_of(held_[0].dtype());
      weights_.bits = 8 * mx::size_of(held_[0].dtype());
      weights_.k = weights_.group = shape.back();
    } else {
      require(bits >= 2 && bits <= 8 && bits != 7 && group % 16 == 0 && group > 0, "codes have 2 to 6 or 8 bits, groups a multiple of 16");
      weights_.kind = mode == "affine" ? WEFT_AFFINE : mode == "mxfp4" ? WEFT_MXFP4 : WEFT_NVFP4;
      require(mode == "affine" || mode == "mxfp4" || mode == "nvfp4", "an unknown mode of quantisation");
      require((mode == "affine") == biases.has_value(), "biases belong to the affine mode");
      require(mode == "affine" || bits == 4, "these modes have four bits");
      weights_.bits = bits;
      weights_.group = group;
      weights_.k = size_t(shape.back()) * 8 * held_[0].itemsize() / bits;
      held_.push_back(settled(*scales));
      weights_.scale_kind = biases ? kind_of(held_[1].dtype()) : weights_.kind;
      require(held_[1].size() * group == experts_ * weights_.n * weights_.k, "one scale belongs to each group");
      require(biases || held_[1].itemsize() == 1, "scales of this mode have eight bits");
      weights_.scales = held_[1].data<char>();
    }
    if (biases) {
      held_.push_back(settled(*biases));
      require(held_[2].shape() == held_[1].shape() && held_[2].dtype() == held_[1].dtype(), "biases are like scales");
      weights_.biases = held_[2].data<char>();
    }
    weights_.codes = held_[0].data<char>();
    if (bias) {
      bias_ = settled(mx::astype(*bias, mx::float32));
      require(bias_->size() == experts_ * weights_.n, "one bias belongs to each output");
    }
  }

  const weft_weights* get() const { return &weights_; }
  const float* bias() const { return bias_ ? bias_->data<float>() : nullptr; }
  size_t n() const { return weights_.n; }
  size_t k() const { return weights_.k; }
  size_t experts() const { return experts_; }

  weft_weights expert(size_t index) const {
    weft_weights one = weights_;
    const size_t scale_size = held_.size() > 1 ? held_[1].itemsize() : 0, groups = weights_.k / weights_.group;
    one.codes = static_cast<const char*>(one.codes) + index * weights_.n * (weights_.k * weights_.bits / 8);
    if (one.scales) one.scales = static_cast<const char*>(one.scales) + index * weights_.n * groups * scale_size;
    if (one.biases) one.biases = static_cast<const char*>(one.biases) + index * weights_.n * groups * scale_size;
    return one;
  }

 private:
  Arrays held_;
  Optional bias_;
  size_t experts_ = 1;
  weft_weights weights_{};
};

// The weight of an RMSNorm and its epsilon.
class Norm {
 public:
  Norm(mx::array weight, float eps) : weight_(settled(mx::astype(weight, mx::float32))), eps(eps) {}
  const float* weight() const { return weight_.data<float>(); }
  size_t size() const { return weight_.size(); }

 private:
  mx::array weight_;

 public:
  float eps;
};

using NormPointer = std::shared_ptr<const Norm>;

void require_numbers(const mx::array& x, size_t last) {
  require(x.dtype() == mx::float32 && x.ndim() > 0 && size_t(x.shape(-1)) == last, "rows must be float32 and as long as the weights'");
}

// x, or its rows brought to a mean square of one in memory that lives as long as the result.
struct Rows {
  Rows(const mx::array& x, const NormPointer& norm) : data(x.data<float>()) {
    if (!norm) return;
    memory = std::make_unique_for_overwrite<float[]>(x.size());
    weft_norm(data, norm->weight(), norm->eps, memory.get(), x.size() / norm->size(), norm->size());
    data = memory.get();
  }
  const float* data;
  std::unique_ptr<float[]> memory;
};

using WeightsPointer = std::shared_ptr<const Weights>;

// The products of rows (m, k) with weights, in lines of `stride` numbers; a residual (m, n) is added.
void multiply(const Weights& weights, const float* rows, size_t m, float* found, size_t stride, const float* residual = nullptr) {
  const struct weft_linear one{m, weights.k(), stride, rows, weights.bias(), residual, found, weights.get()};
  weft_linear(&one);
}

// The products of rows with several weights side by side, in lines of `stride` numbers.
template <class Pointer>
void multiply_joint(const std::vector<Pointer>& parts, const float* rows, size_t m, float* found, size_t stride) {
  std::vector<const weft_weights*> weights;
  std::vector<const float*> biases;
  for (const auto& part : parts) weights.push_back((*part).get()), biases.push_back(part->bias());
  const struct weft_joint joint{m, parts[0]->k(), stride, parts.size(), rows, found, weights.data(), biases.data()};
  weft_joint(&joint);
}

// The products of (normed) rows with several weights, beside each other in one output line; a residual is added to the whole.
mx::array linear(const mx::array& x, std::vector<Handle<Weights>> parts, const Handle<Norm>* its_norm, Optional residual) {
  const NormPointer norm = pointer_of(its_norm);
  require(!parts.empty(), "there must be weights");
  size_t width = 0;
  for (const auto& part : parts) {
    require_numbers(x, part->k());
    width += part->n();
  }
  require(!norm || norm->size() == parts[0]->k(), "the norm is as long as a row");
  require(!residual || (parts.size() == 1 && residual->dtype() == mx::float32 && residual->size() == lines_of(x) * width),
          "a residual is as large as the output of one product");
  Arrays inputs{x};
  if (residual) inputs.push_back(*residual);
  auto work = [parts = std::move(parts), norm, width](const Arrays& in, Arrays& out) {
    const Rows rows(in[0], norm);
    if (in.size() == 1)
      multiply_joint(parts, rows.data, lines_of(in[0]), out[0].data<float>(), width);
    else
      multiply(*parts[0], rows.data, lines_of(in[0]), out[0].data<float>(), width, in[1].data<float>());
  };
  return operation("weft.linear", with_last(x.shape(), width), std::move(inputs), std::move(work));
}

mx::array gated(const mx::array& x, const Handle<Weights>& gate, const Handle<Weights>& up, const Handle<Norm>* its_norm) {
  const NormPointer norm = pointer_of(its_norm);
  require_numbers(x, gate->k());
  require(up->k() == gate->k() && up->n() == gate->n() && !gate->bias() && !up->bias(), "gate and up have one shape and no bias");
  require(!norm || norm->size() == gate->k(), "the norm is as long as a row");
  const auto shape = with_last(x.shape(), gate->n());
  auto work = [gate, up, norm](const Arrays& in, Arrays& out) {
    const Rows rows(in[0], norm);
    const struct weft_gated one{lines_of(in[0]), rows.data, out[0].data<float>(), gate->get(), up->get()};
    weft_gated(&one);
  };
  return operation("weft.gated", shape, {x}, std::move(work));
}

// ---- mixtures of experts

// The places of `indices` (one expert each) by expert.
std::vector<std::vector<size_t>> places_by_expert(const mx::array& indices, size_t experts) {
  std::vector<std::vector<size_t>> places(experts);
  for (size_t i = 0; i < indices.size(); i++) {
    const uint32_t expert = indices.data<uint32_t>()[i];
    if (expert < experts) places[expert].push_back(i);
  }
  return places;
}

void gather(const float* from, const std::vector<size_t>& places, size_t share, size_t width, std::vector<float>& to) {
  to.resize(places.size() * width);
  for (size_t i = 0; i < places.size(); i++) std::memcpy(&to[i * width], from + places[i] / share * width, width * sizeof(float));
}

void scatter(const std::vector<float>& from, const std::vector<size_t>& places, size_t width, float* to) {
  for (size_t i = 0; i < places.size(); i++) std::memcpy(to + places[i] * width, &from[i * width], width * sizeof(float));
}

void multiply(const Weights& weights, size_t expert, const std::vector<float>& rows, std::vector<float>& found) {
  const weft_weights one = weights.expert(expert);
  const size_t m = rows.size() / one.k;
  found.resize(m * one.n);
  const float* bias = weights.bias() ? weights.bias() + expert * one.n : nullptr;
  const struct weft_linear product{m, one.k, one.n, rows.data(), bias, nullptr, found.data(), &one};
  weft_linear(&product);
}

void require_indices(const mx::array& x, const mx::array& indices, size_t k) {
  require_numbers(x, k);
  require(indices.dtype() == mx::int32 || indices.dtype() == mx::uint32, "experts are named by whole numbers of 32 bits");
  require(lines_of(x) > 0 && indices.size() % lines_of(x) == 0, "each line has as many experts as any other");
}

// Each line's product with the weights of each of its experts: x (lines, k), indices (lines, top) -> (lines, top, n). With as
// many lines as indices each has its own.
mx::array switched(const mx::array& x, const mx::array& indices, const Handle<Weights>& weights) {
  require_indices(x, indices, weights->k());
  auto shape = indices.shape();
  shape.push_back(static_cast<int>(weights->n()));
  auto work = [weights](const Arrays& in, Arrays& out) {
    const size_t share = in[1].size() / lines_of(in[0]);
    const auto places = places_by_expert(in[1], weights->experts());
    std::vector<float> rows, found;
    for (size_t expert = 0; expert < places.size(); expert++) {
      if (places[expert].empty()) continue;
      gather(in[0].data<float>(), places[expert], share, weights->k(), rows);
      multiply(*weights, expert, rows, found);
      scatter(found, places[expert], weights->n(), out[0].data<float>());
    }
  };
  return operation("weft.switched", shape, {x, indices}, std::move(work));
}

// The gated MLP of each of a line's experts: x (..., k), indices (..., top) -> (..., top, k).
mx::array experts(const mx::array& x, const mx::array& indices, const Handle<Weights>& gate, const Handle<Weights>& up,
                  const Handle<Weights>& down) {
  require_indices(x, indices, gate->k());
  require(up->k() == gate->k() && up->n() == gate->n() && down->k() == gate->n() && !gate->bias() && !up->bias(), "experts have one shape");
  require(up->experts() == gate->experts() && down->experts() == gate->experts(), "every expert has three matrices");
  auto shape = indices.shape();
  shape.push_back(static_cast<int>(down->n()));
  auto work = [gate, up, down](const Arrays& in, Arrays& out) {
    const size_t share = in[1].size() / lines_of(in[0]);
    const auto places = places_by_expert(in[1], gate->experts());
    std::vector<float> rows, inner, found;
    for (size_t expert = 0; expert < places.size(); expert++) {
      if (places[expert].empty()) continue;
      gather(in[0].data<float>(), places[expert], share, gate->k(), rows);
      inner.resize(places[expert].size() * gate->n());
      const weft_weights its_gate = gate->expert(expert), its_up = up->expert(expert);
      const struct weft_gated first{places[expert].size(), rows.data(), inner.data(), &its_gate, &its_up};
      weft_gated(&first);
      multiply(*down, expert, inner, found);
      scatter(found, places[expert], down->n(), out[0].data<float>());
    }
  };
  return operation("weft.experts", shape, {x, indices}, std::move(work));
}

// Rows of an embedding. A token that is not there has zeros: the caller has checked it.
mx::array embed(const mx::array& tokens, const Handle<Weights>& weights) {
  require(tokens.dtype() == mx::int32 || tokens.dtype() == mx::uint32, "tokens are whole numbers of 32 bits");
  auto shape = tokens.shape();
  shape.push_back(static_cast<int>(weights->k()));
  auto work = [weights](const Arrays& in, Arrays& out) {
    for (size_t i = 0; i < in[0].size(); i++) {
      const uint32_t token = in[0].data<uint32_t>()[i];
      float* to = out[0].data<float>() + i * weights->k();
      if (token < weights->n())
        weft_expand(weights->get(), token, to);
      else
        std::memset(to, 0, weights->k() * sizeof(float));
    }
  };
  return operation("weft.embed", shape, {tokens}, std::move(work));
}

mx::array norm(const mx::array& x, const Handle<Norm>& norm) {
  require_numbers(x, norm->size());
  auto work = [norm](const Arrays& in, Arrays& out) {
    weft_norm(in[0].data<float>(), norm->weight(), norm->eps, out[0].data<float>(), lines_of(in[0]), norm->size());
  };
  return operation("weft.norm", x.shape(), {x}, std::move(work));
}

mx::array silu(const mx::array& x) {
  require(x.dtype() == mx::float32, "gates are float32");
  auto work = [](const Arrays& in, Arrays& out) { weft_silu(in[0].data<float>(), out[0].data<float>(), in[0].size()); };
  return operation("weft.silu", x.shape(), {x}, std::move(work));
}

bool is_ready(const mx::array& x) { return x.is_available() && x.flags().row_contiguous; }

// The outputs of an operation whose inputs may be computed already: then it is computed at once, else when MLX comes to it.
std::vector<mx::array> at_once_or_later(const char* name, std::vector<mx::Shape> shapes, std::vector<mx::Dtype> types, Work work, Arrays inputs) {
  if (std::all_of(inputs.begin(), inputs.end(), is_ready)) {
    nb::gil_scoped_release released;
    return compute_now(shapes, types, work, {}, std::move(inputs));
  }
  return mx::array::make_arrays(std::move(shapes), types, std::make_shared<Operation>(name, std::move(work)), inputs);
}

// A token of each line of logits (m, n) and what is wrong with it (weft_choose), as two outputs of one operation; at once where the logits
// are computed already. `top_k` and `top_p`: of every line, or empty: all tokens of every line.
std::vector<mx::array> choose(const mx::array& logits, std::vector<float> temperature, std::vector<float> min_p, Optional allowed, Optional uniform,
                              std::vector<int32_t> top_k, std::vector<float> top_p) {
  const size_t m = temperature.size();
  if (top_k.empty()) top_k.resize(m, 0);
  if (top_p.empty()) top_p.resize(m, 1.0f);
  require(logits.ndim() == 2 && logits.dtype() == mx::float32 && size_t(logits.shape(0)) == m && min_p.size() == m && logits.shape(1) > 0,
          "every line of logits has its temperature");
  require(top_k.size() == m && top_p.size() == m, "every line of logits has its top_k and top_p");
  require(!allowed || (allowed->dtype() == mx::bool_ && allowed->shape() == logits.shape()), "every logit is allowed or not");
  require(!uniform || (uniform->dtype() == mx::float32 && uniform->size() == m), "every line has its random number");
  Arrays inputs{logits};
  if (allowed) inputs.push_back(is_ready(*allowed) ? *allowed : mx::contiguous(*allowed));  // bytes: others are copied in numbers of four
  if (uniform) inputs.push_back(*uniform);
  auto work = [=, is_masked = allowed.has_value(), is_drawn = uniform.has_value()](const Arrays& in, Arrays& out) {
    const struct weft_choice one{m, size_t(in[0].shape(1)), in[0].data<float>(), is_masked ? in[1].data<uint8_t>() : nullptr,
                                 temperature.data(), min_p.data(), top_p.data(), is_drawn ? in.back().data<float>() : nullptr, top_k.data(),
                                 out[0].data<int32_t>(), out[1].data<int32_t>()};
    weft_choose(&one);
  };
  const mx::Shape shape{static_cast<int>(m)};
  return at_once_or_later("weft.choose", {shape, shape}, {mx::int32, mx::int32}, std::move(work), std::move(inputs));
}

// Log-probabilities of some lines of logits (m, n), each of its own of the tokens (m,), and the `count` likeliest tokens with theirs (weft_logprobs).
std::vector<mx::array> logprobs(const mx::array& logits, const mx::array& tokens, std::vector<int32_t> lines, int count) {
  require(logits.ndim() == 2 && logits.dtype() == mx::float32 && tokens.dtype() == mx::int32 && tokens.size() == size_t(logits.shape(0)),
          "every line of logits has its token");
  require(count >= 0 && count <= logits.shape(1), "there are as many tokens as are asked for");
  require(std::all_of(lines.begin(), lines.end(), [&](int32_t line) { return line >= 0 && line < logits.shape(0); }), "all lines are there");
  const int m = static_cast<int>(lines.size());
  auto work = [lines = std::move(lines), count](const Arrays& in, Arrays& out) {
    const struct weft_logprobs one{lines.size(), size_t(in[0].shape(1)), size_t(count), in[0].data<float>(), lines.data(), in[1].data<int32_t>(),
                                   out[0].data<float>(), out[1].data<int32_t>(), out[2].data<float>()};
    weft_logprobs(&one);
  };
  const mx::Shape each{m}, all{m, count};
  return at_once_or_later("weft.logprobs", {each, all, all}, {mx::float32, mx::int32, mx::float32}, std::move(work), {logits, tokens});
}

// x (B, heads, T, dim) rotated by angles (B or 1, 1, T, 2 * half).
mx::array rotate(const mx::array& x, const mx::array& angles, bool of_neighbours) {
  require(x.ndim() == 4 && angles.ndim() == 4 && x.dtype() == mx::float32 && angles.dtype() == mx::float32, "four axes of float32");
  require(angles.shape(2) == x.shape(2) && angles.shape(1) == 1 && angles.shape(3) <= x.shape(3) && angles.shape(3) % 2 == 0 &&
              (angles.shape(0) == 1 || angles.shape(0) == x.shape(0)),
          "angles belong to each token");
  auto work = [of_neighbours](const Arrays& in, Arrays& out) {
    const size_t tokens = in[0].shape(2), n = in[0].shape(3), m = in[0].size() / n;
    const weft_rotation one{in[0].data<float>(), in[1].data<float>(), out[0].data<float>(), m, n, size_t(in[1].shape(3)) / 2, m, 0,
                            in[0].shape(1) * tokens, in[1].shape(0) == 1 ? 0 : tokens, 1, tokens, of_neighbours};
    weft_rotate(&one);
  };
  return operation("weft.rotate", x.shape(), {x, angles}, std::move(work));
}

// Angles (..., T, 2 * half) of rotary positions: cosines, then sines. places (..., T, half or 1) of any type of numbers.
mx::array angles(const mx::array& places, const mx::array& rates, float scale) {
  const int half = static_cast<int>(rates.size());
  require(places.ndim() > 0 && (places.shape(-1) == half || places.shape(-1) == 1), "a position belongs to each rate or to all");
  auto work = [scale](const Arrays& in, Arrays& out) {
    const size_t half = in[1].size();
    const struct weft_angles one{out[0].size() / (2 * half), half, in[0].data<float>(), in[1].data<float>(), scale, in[0].shape(-1) == 1 && half != 1,
                                out[0].data<float>()};
    weft_angles(&one);
  };
  return operation("weft.angles", with_last(places.shape(), 2 * half), {mx::astype(places, mx::float32), mx::astype(rates, mx::float32)}, std::move(work));
}

// The same for `tokens` positions from each row's offset (B,) on: (B, 1, tokens, 2 * half).
mx::array angles_from(const mx::array& offsets, int tokens, const mx::array& rates, float scale) {
  require(offsets.ndim() == 1 && offsets.dtype() == mx::int32 && rates.dtype() == mx::float32 && tokens > 0, "offsets are whole numbers, one of each row");
  const int rows = offsets.shape(0), half = static_cast<int>(rates.size());
  auto work = [scale, tokens, half](const Arrays& in, Arrays& out) {
    std::vector<float> places;
    for (size_t row = 0; row < in[0].size(); row++)
      for (int token = 0; token < tokens; token++) places.push_back(static_cast<float>(in[0].data<int32_t>()[row] + token));
    const struct weft_angles one{places.size(), size_t(half), places.data(), in[1].data<float>(), scale, true, out[0].data<float>()};
    weft_angles(&one);
  };
  return operation("weft.angles", {rows, 1, tokens, 2 * half}, {offsets, rates}, std::move(work));
}

size_t stride_of(const mx::array& x) { return x.shape(-2) == 1 ? x.shape(-1) : x.strides(-2); }

// softmax(q @ keys^T + bias), (..., m, dim) by (..., span, dim); leading axes are broadcast.
mx::array attention_weights(mx::array q, mx::array keys, Optional bias, size_t tokens) {
  require(q.ndim() >= 2 && q.ndim() == keys.ndim() && q.shape(-1) == keys.shape(-1), "queries and keys have one width");
  q = mx::astype(q, mx::float32), keys = mx::astype(keys, mx::float32);  // nothing where they are
  auto shape = q.shape();
  for (size_t axis = 0; axis + 2 < shape.size(); axis++) shape[axis] = std::max(shape[axis], keys.shape(axis));
  auto whole_keys = shape, whole_q = shape;
  whole_keys[shape.size() - 2] = keys.shape(-2);
  shape.back() = keys.shape(-2);
  require(!tokens || (shape[shape.size() - 2] % tokens == 0 && tokens <= size_t(shape.back())), "rows are those of whole tokens");
  Arrays inputs{mx::broadcast_to(q, whole_q), mx::broadcast_to(keys, whole_keys)};
  if (bias) inputs.push_back(mx::broadcast_to(mx::astype(*bias, mx::float32), shape));
  auto work = [tokens](const Arrays& in, Arrays& out) {
    const size_t m = out[0].shape(-2), span = out[0].shape(-1), k = in[0].shape(-1);
    for (size_t i = 0; i < out[0].size() / (m * span); i++) {
      const struct weft_scores one{m, span, k, stride_of(in[0]), stride_of(in[1]), in.size() > 2 ? stride_of(in[2]) : 0, tokens,
                                   matrix_at(in[0], i), matrix_at(in[1], i), in.size() > 2 ? matrix_at(in[2], i) : nullptr,
                                   out[0].data<float>() + i * m * span};
      weft_scores(&one);
    }
  };
  return operation("weft.attention_weights", shape, std::move(inputs), std::move(work), false, Takes::strided_rows);
}

// ---- attention over slabs

// The rows of a step: of each the slab, the slot there, the tokens it has, how many come, and the line of the first of these.
using Row = std::tuple<size_t, size_t, size_t, size_t, size_t>;

class StepRows {
 public:
  explicit StepRows(const std::vector<Row>& rows) : rows_(rows) {
    for (const auto& [slab, slot, first, tokens, line] : rows_) {
      lines_ = std::max(lines_, line + tokens);
      slabs_ = std::max(slabs_, slab + 1);
    }
  }
  size_t size() const { return rows_.size(); }
  size_t lines() const { return lines_; }
  size_t slabs() const { return slabs_; }
  size_t slab(size_t row) const { return std::get<0>(rows_[row]); }
  size_t end(size_t row) const { return std::get<2>(rows_[row]) + std::get<3>(rows_[row]); }

  // Whether every row has its place in slabs of these shapes (slots, heads, places, dim).
  bool fits(size_t which, const mx::array& slab) const {
    return slab.ndim() == 4 && slab.dtype() == mx::float32 && std::all_of(rows_.begin(), rows_.end(), [&](const auto& row) {
             const auto& [index, slot, first, tokens, line] = row;
             return index != which || (slot < size_t(slab.shape(0)) && first + tokens <= size_t(slab.shape(2)));
           });
  }

  // The rows of all slabs, or of one, with their memory there.
  std::vector<weft_row> at(const Arrays& in, size_t keys, size_t values, std::optional<size_t> only = std::nullopt) const {
    std::vector<weft_row> found;
    for (const auto& [slab, slot, first, tokens, line] : rows_) {
      if (only && slab != *only) continue;
      const size_t at = only ? 0 : slab;
      const auto& plane = in[keys + at];
      const size_t start = slot * size_t(plane.shape(1)) * plane.shape(2) * plane.shape(3);
      float* k = const_cast<float*>(plane.data<float>()) + start;
      float* v = const_cast<float*>(in[values + at].data<float>()) + start;
      found.push_back({k, v, size_t(plane.shape(2)), first, tokens, line});
    }
    return found;
  }

 private:
  std::vector<Row> rows_;
  size_t lines_ = 0, slabs_ = 0;
};

// How an attention layer's heads lie in a line of the joint product, and what is done to them.
struct Heads {
  size_t heads, kv_heads, dim;
  float scale;
  bool of_neighbours;
  NormPointer q_norm, k_norm;
  bool is_gated;  // a head's queries are followed by as many gates of its output
};

size_t first_key(const Heads& h) { return h.heads * h.dim * (h.is_gated ? 2 : 1); }
size_t line_width(const Heads& h) { return first_key(h) + 2 * h.kv_heads * h.dim; }

void require_lines(const mx::array& lines, const Heads& h, const StepRows& rows, const Optional& angles) {
  require_numbers(lines, line_width(h));
  require(lines_of(lines) == rows.lines(), "every line belongs to a row");
  require(!angles || (angles->dtype() == mx::float32 && size_t(angles->shape(-1)) <= h.dim && angles->shape(-1) % 2 == 0 &&
                      lines_of(*angles) == rows.lines()),
          "angles belong to each line");
}

void require_slabs(const Arrays& keys, const Arrays& values, const StepRows& rows, const Heads& h) {
  require(keys.size() == rows.slabs() && values.size() == keys.size(), "each slab has keys and values");
  for (size_t i = 0; i < keys.size(); i++)
    require(rows.fits(i, keys[i]) && keys[i].shape() == values[i].shape() && size_t(keys[i].shape(1)) == h.kv_heads &&
                size_t(keys[i].shape(3)) == h.dim,
            "rows have their place");
}

// A slab (slots, heads, places, dim) with the new keys, or values, of its rows.
mx::array append(const mx::array& slab, const mx::array& lines, Optional angles, const Handle<StepRows>& rows, const Handle<Heads>& h,
                 size_t which, bool is_values) {
  require_lines(lines, *h, *rows, angles);
  require(rows->fits(which, slab) && size_t(slab.shape(1)) == h->kv_heads && size_t(slab.shape(3)) == h->dim, "rows have their place");
  Arrays inputs{slab, lines};
  const bool has_angles = angles && !is_values;
  if (has_angles) inputs.push_back(*angles);
  auto work = [rows, h, which, is_values, has_angles](const Arrays& in, Arrays& out) {
    const auto found = rows->at(out, 0, 0, which);
    const float* x = in[1].data<float>() + first_key(*h) + (is_values ? h->kv_heads * h->dim : 0);
    const Norm* norm = is_values ? nullptr : h->k_norm.get();
    const struct weft_append one{found.data(), found.size(), h->kv_heads, h->dim, line_width(*h), has_angles ? size_t(in[2].shape(-1)) / 2 : 0,
                          x, has_angles ? in[2].data<float>() : nullptr, norm ? norm->weight() : nullptr, norm ? norm->eps : 0.0f,
                          h->of_neighbours};
    weft_append(&one);
  };
  return operation("weft.append", slab.shape(), std::move(inputs), std::move(work), true);
}

// Attention of every line over its row's keys and values, which the slabs have already.
mx::array attend(const mx::array& lines, Arrays keys, Arrays values, Optional angles, const Handle<StepRows>& rows,
                 const Handle<Heads>& h) {
  require_lines(lines, *h, *rows, angles);
  require_slabs(keys, values, *rows, *h);
  const size_t num_slabs = keys.size();
  Arrays inputs{lines};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  const bool has_angles = angles.has_value();
  if (has_angles) inputs.push_back(*angles);
  const auto shape = with_last(lines.shape(), h->heads * h->dim);
  auto work = [rows, h, num_slabs, has_angles](const Arrays& in, Arrays& out) {
    const auto found = rows->at(in, 1, 1 + num_slabs);
    const size_t turns = 1 + 2 * num_slabs;
    const Norm* norm = h->q_norm.get();
    const weft_attention one{found.data(), found.size(), h->heads, h->kv_heads, h->dim, line_width(*h),
                             has_angles ? size_t(in[turns].shape(-1)) / 2 : 0, in[0].data<float>(),
                             has_angles ? in[turns].data<float>() : nullptr, norm ? norm->weight() : nullptr, h->scale,
                             norm ? norm->eps : 0.0f, h->of_neighbours, h->is_gated, out[0].data<float>()};
    weft_attend(&one);
  };
  return operation("weft.attend", shape, std::move(inputs), std::move(work));
}

}  // namespace weft

#include "mtp_head.h"
#include "recurrences.h"
#include "fused_model.h"

NB_MODULE(_primitives, m) {
  using namespace nb::literals;
  using namespace weft;
  nb::set_leak_warnings(false);  // the interpreter ends with graphs that hold weights
  if (weft_api() != WEFT_API) throw std::runtime_error("weft's two libraries are of different versions: reinstall weft");
  m.attr("mlx_version") = WEFT_MLX_VERSION;

  nb::class_<Handle<Weights>>(m, "Weights")
      .def("__init__", [](Handle<Weights>* self, mx::array codes, Optional scales, Optional biases, const std::string& mode, size_t bits,
                          size_t group, Optional bias) {
        new (self) Handle<Weights>(std::make_shared<const Weights>(codes, scales, biases, mode, bits, group, bias));
      }, "codes"_a, "scales"_a.none() = nb::none(), "biases"_a.none() = nb::none(), "mode"_a = "affine", "bits"_a = 0, "group_size"_a = 0,
           "bias"_a.none() = nb::none())
      .def_prop_ro("num_outputs", [](const Handle<Weights>& self) { return self->n(); })
      .def_prop_ro("num_inputs", [](const Handle<Weights>& self) { return self->k(); });
  nb::class_<Handle<Norm>>(m, "Norm").def("__init__", [](Handle<Norm>* self, mx::array weight, float eps) {
    new (self) Handle<Norm>(std::make_shared<const Norm>(weight, eps));
  }, "weight"_a, "eps"_a);
  nb::class_<Handle<StepRows>>(m, "StepRows").def("__init__", [](Handle<StepRows>* self, const std::vector<Row>& rows) {
    new (self) Handle<StepRows>(std::make_shared<const StepRows>(rows));
  }, "rows"_a);
  nb::class_<Handle<Heads>>(m, "Heads")
      .def("__init__", [](Handle<Heads>* self, size_t heads, size_t kv_heads, size_t dim, float scale, bool of_neighbours,
                          const Handle<Norm>* q_norm, const Handle<Norm>* k_norm, bool is_gated) {
        require(kv_heads > 0 && heads % kv_heads == 0 && dim > 0, "query heads share heads of keys evenly");
        require((!q_norm || (*q_norm)->size() == dim) && (!k_norm || (*k_norm)->size() == dim), "a head's norm is as long as a head");
        new (self) Handle<Heads>(
            std::make_shared<const Heads>(Heads{heads, kv_heads, dim, scale, of_neighbours, pointer_of(q_norm), pointer_of(k_norm), is_gated}));
      }, "num_heads"_a, "num_kv_heads"_a, "dim"_a, "scale"_a, "of_neighbours"_a, "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(),
           "is_gated"_a = false);
  nb::class_<Handle<DeltaLayer>>(m, "DeltaLayer").def("__init__", [](Handle<DeltaLayer>* self, mx::array convolution, mx::array rate, mx::array bias,
                                                                    const Handle<Norm>& query_norm, const Handle<Norm>& key_norm, const Handle<Norm>& norm) {
    new (self) Handle<DeltaLayer>(std::make_shared<const DeltaLayer>(convolution, rate, bias, query_norm, key_norm, norm));
  }, "convolution"_a, "rate"_a, "bias"_a, "query_norm"_a, "key_norm"_a, "norm"_a);

  nb::class_<Handle<FusedModel>>(m, "FusedModel").def("__init__", [](Handle<FusedModel>* self, const Handle<Weights>& embedding,
                                                                    const std::vector<LayerParts>& layers, const Handle<Norm>& norm,
                                                                    const Handle<Weights>& vocabulary, const std::vector<Turns>& turns, bool is_normed) {
    new (self) Handle<FusedModel>(make_model(embedding, layers, norm, vocabulary, turns, is_normed));
  }, "embedding"_a, "layers"_a, "norm"_a, "vocabulary"_a, "turns"_a, "is_normed"_a);
  nb::class_<Handle<FusedRows>>(m, "FusedRows").def("__init__", [](Handle<FusedRows>* self, const std::vector<FusedRow>& rows) {
    new (self) Handle<FusedRows>(make_rows(rows));
  }, "rows"_a);
  nb::class_<Handle<MTPHead>>(m, "MTPHead")
      .def("__init__", [](Handle<MTPHead>* self, const Handle<Weights>& embedding, const Handle<Weights>& projection,
                          const std::vector<Handle<Weights>>& joint, const Handle<Weights>& output, const std::vector<Handle<Weights>>& inward,
                          const Handle<Weights>& down, const Handle<Weights>& vocabulary,
                          const Handle<Norm>& embedding_norm, const Handle<Norm>& hidden_norm, const Handle<Norm>& input_norm,
                          const Handle<Norm>& mlp_norm, const Handle<Norm>* output_norm, const Handle<Heads>& heads, mx::array rates, float scale,
                          bool hidden_first, bool is_normed) {
        const MTPHead head{embedding, projection, output, down, vocabulary, {joint.begin(), joint.end()}, {inward.begin(), inward.end()}, embedding_norm,
                           hidden_norm, input_norm, mlp_norm, pointer_of(output_norm), heads, settled(mx::astype(rates, mx::float32)), scale, hidden_first,
                           is_normed};
        require_head(head);
        new (self) Handle<MTPHead>(std::make_shared<const MTPHead>(head));
      }, "embedding"_a, "projection"_a, "joint"_a, "output"_a, "inward"_a, "down"_a, "vocabulary"_a, "embedding_norm"_a, "hidden_norm"_a,
           "input_norm"_a, "mlp_norm"_a, "output_norm"_a.none(), "heads"_a, "rates"_a, "scale"_a, "hidden_first"_a, "is_normed"_a);

  m.def("linear", &linear, "x"_a, "weights"_a, "norm"_a.none() = nb::none(), "residual"_a.none() = nb::none());
  m.def("gated", &gated, "x"_a, "gate"_a, "up"_a, "norm"_a.none() = nb::none());
  m.def("switched", &switched, "x"_a, "indices"_a, "weights"_a);
  m.def("experts", &experts, "x"_a, "indices"_a, "gate"_a, "up"_a, "down"_a);
  m.def("embed", &embed, "tokens"_a, "weights"_a);
  m.def("norm", &norm, "x"_a, "norm"_a);
  m.def("silu", &silu, "x"_a);
  m.def("choose", &choose, "logits"_a, "temperature"_a, "min_p"_a, "allowed"_a.none() = nb::none(), "uniform"_a.none() = nb::none(),
        "top_k"_a = std::vector<int32_t>{}, "top_p"_a = std::vector<float>{});
  m.def("logprobs", &logprobs, "logits"_a, "tokens"_a, "lines"_a, "count"_a);
  m.def("angles", &angles, "places"_a, "rates"_a, "scale"_a);
  m.def("angles_from", &angles_from, "offsets"_a, "tokens"_a, "rates"_a, "scale"_a);
  m.def("rotate", &rotate, "x"_a, "angles"_a, "of_neighbours"_a);
  m.def("attention_weights", &attention_weights, "queries"_a, "keys"_a, "bias"_a.none(), "tokens"_a);
  m.def("append", &append, "slab"_a, "lines"_a, "angles"_a.none(), "rows"_a, "heads"_a, "which"_a, "is_values"_a);
  m.def("attend", &attend, "lines"_a, "keys"_a, "values"_a, "angles"_a.none(), "rows"_a, "heads"_a);
  m.def("recur", &recur, "state"_a, "value"_a, "key"_a, "query"_a, "gate"_a, "beta"_a.none(), "keeps"_a);
  m.def("delta", &delta, "lines"_a, "columns"_a, "state"_a, "layer"_a, "keeps"_a);
  m.def("decode_step", &decode_step, "tokens"_a, "rows"_a, "model"_a, "memory"_a, "table"_a);
  m.def("clear_places", &clear_places, "slabs"_a, "ranges"_a);
  m.def("keep_step", &keep_step, "sampled"_a, "rows"_a, "model"_a, "states"_a, "hidden"_a.none(), "table"_a, "head"_a.none(), "slabs"_a, "sampling"_a,
        "count"_a);
  m.def("head_lines", &head_lines, "tokens"_a, "hidden"_a, "starts"_a, "offsets"_a, "head"_a);
  m.def("head_guess", &head_guess, "lines"_a, "states"_a, "angles"_a, "keys"_a, "values"_a, "rows"_a, "head"_a, "chosen"_a.none() = nb::none());
  m.def("shift", &shift, "x"_a, "last"_a);
  m.def("windows", &windows, "arrays"_a, "starts"_a, "counts"_a);
  m.def("window", &window, "x"_a, "starts"_a, "count"_a.none() = nb::none());
}
