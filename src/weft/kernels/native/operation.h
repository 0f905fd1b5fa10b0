// An operation of MLX's graph that one of our functions computes: inputs row-contiguous, one output, in the CPU stream's order.
//
// MLX decides when: `eval_cpu` allocates the output and hands the work to the stream's thread, where `Work` runs.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace weft {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;
using Work = std::function<void(const Arrays& inputs, Arrays& outputs)>;

// Copies an array of any strides to a row-contiguous one of four-byte numbers; slow, and seldom needed.
inline void copy_strided(const mx::array& from, mx::array& to) {
  const auto& shape = from.shape();
  const auto& strides = from.strides();
  const auto* source = from.data<uint32_t>();
  auto* target = to.data<uint32_t>();
  std::vector<size_t> at(shape.size(), 0);
  const size_t inner = shape.empty() ? 1 : shape.back();
  const int64_t step = shape.empty() ? 1 : strides.back();
  for (size_t done = 0; done < from.size(); done += inner) {
    int64_t offset = 0;
    for (size_t axis = 0; axis + 1 < shape.size(); axis++) offset += at[axis] * strides[axis];
    for (size_t i = 0; i < inner; i++) *target++ = source[offset + int64_t(i) * step];
    for (size_t axis = shape.size() - 1; axis-- > 0;) {
      if (++at[axis] < size_t(shape[axis])) break;
      at[axis] = 0;
    }
  }
}

class Operation : public mx::Primitive {
 public:
  // `in_place`: the output is the first input changed; its memory is used again where nobody else looks at it.
  Operation(const char* name, Work work, bool in_place = false)
      : Primitive(mx::default_stream(mx::Device::cpu)), name_(name), work_(std::move(work)), in_place_(in_place) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Arrays used, strided;
    used.reserve(inputs.size());
    for (const auto& input : inputs) {
      if (input.flags().row_contiguous) {
        used.push_back(mx::array::unsafe_weak_copy(input));
        continue;
      }
      mx::array copy(input.shape(), input.dtype(), nullptr, {});
      copy.set_data(mx::allocator::malloc(copy.nbytes()));
      encoder.add_temporary(copy);
      strided.push_back(mx::array::unsafe_weak_copy(input));
      strided.push_back(mx::array::unsafe_weak_copy(copy));
      used.push_back(mx::array::unsafe_weak_copy(copy));
    }
    const bool is_reused = in_place_ && inputs[0].flags().row_contiguous && inputs[0].is_donatable();
    if (is_reused)
      outputs[0].copy_shared_buffer(inputs[0]);
    else
      for (auto& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
    Arrays made;
    for (const auto& output : outputs) made.push_back(mx::array::unsafe_weak_copy(output));
    encoder.dispatch([work = work_, must_copy = in_place_ && !is_reused, used = std::move(used), strided = std::move(strided),
                      made = std::move(made)]() mutable {
      for (size_t i = 0; i < strided.size(); i += 2) copy_strided(strided[i], strided[i + 1]);
      if (must_copy) std::memcpy(made[0].data<char>(), used[0].data<char>(), used[0].nbytes());
      work(used, made);
    });
  }

  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("weft's operations are for CPUs"); }
  const char* name() const override { return name_; }

 private:
  const char* name_;
  Work work_;
  bool in_place_;
};

inline mx::array operation(const char* name, mx::Shape shape, Arrays inputs, Work work, bool in_place = false) {
  return mx::array(std::move(shape), mx::float32, std::make_shared<Operation>(name, std::move(work), in_place), std::move(inputs));
}

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace weft
