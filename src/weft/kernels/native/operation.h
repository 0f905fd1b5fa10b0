// An operation of MLX's graph that one of our functions computes: inputs row-contiguous, in the CPU stream's order.
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

// What Python holds of an object that operations share. Never nanobind's own shared pointer: its last owner may be the stream's
// thread, which would then wait for the interpreter's lock, and at the interpreter's end for ever.
template <class T>
struct Handle : std::shared_ptr<const T> {
  explicit Handle(std::shared_ptr<const T> held) : std::shared_ptr<const T>(std::move(held)) {}
};

template <class T>
std::shared_ptr<const T> pointer_of(const Handle<T>* handle) {
  if (!handle) return {};
  return *handle;
}

using Places = std::vector<std::pair<size_t, size_t>>;  // of an input, and of the output that is that input changed

enum class Takes { contiguous, strided_rows };  // of inputs: all numbers one after the other, or those of each row

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
  // `in_place`: whose memory is used again where nobody else looks at it.
  Operation(const char* name, Work work, Places in_place = {}, Takes takes = Takes::contiguous)
      : Primitive(mx::default_stream(mx::Device::cpu)),
        name_(name),
        work_(std::make_shared<const Work>(std::move(work))),
        in_place_(std::move(in_place)),
        takes_(takes) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Arrays used, strided, made;
    used.reserve(inputs.size()), made.reserve(outputs.size());
    for (const auto& input : inputs) {
      if (can_take(input)) {
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
    Places copied = take_memory(inputs, outputs);
    for (const auto& output : outputs) made.push_back(mx::array::unsafe_weak_copy(output));
    encoder.dispatch([work = work_, copied = std::move(copied), used = std::move(used), strided = std::move(strided),
                      made = std::move(made)]() mutable {
      for (size_t i = 0; i < strided.size(); i += 2) copy_strided(strided[i], strided[i + 1]);
      for (const auto& [from, to] : copied) std::memcpy(made[to].data<char>(), used[from].data<char>(), used[from].nbytes());
      (*work)(used, made);
    });
  }

  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("weft's operations are for CPUs"); }
  const char* name() const override { return name_; }

 private:
  bool can_take(const mx::array& x) const {
    return x.flags().row_contiguous || (takes_ == Takes::strided_rows && x.ndim() >= 2 && (x.shape(-1) == 1 || x.strides(-1) == 1));
  }

  // Gives every output its memory: that of its input, or new; returns which inputs must be copied.
  Places take_memory(const Arrays& inputs, Arrays& outputs) const {
    Places copied;
    std::vector<bool> has_memory(outputs.size(), false);
    for (const auto& [from, to] : in_place_) {
      has_memory[to] = inputs[from].flags().row_contiguous && inputs[from].is_donatable();
      if (has_memory[to])
        outputs[to].copy_shared_buffer(inputs[from]);
      else
        copied.emplace_back(from, to);
    }
    for (size_t i = 0; i < outputs.size(); i++)
      if (!has_memory[i]) outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
    return copied;
  }

  const char* name_;
  std::shared_ptr<const Work> work_;
  Places in_place_;
  Takes takes_;
};

// The outputs of a function of ours, computed at once by the calling thread, which need not hold the interpreter's lock. Inputs that
// nobody else holds are changed in place.
inline Arrays compute_now(const std::vector<mx::Shape>& shapes, const std::vector<mx::Dtype>& types, const Work& work, const Places& in_place, Arrays inputs) {
  Arrays outputs;
  std::vector<bool> has_memory(shapes.size(), false);
  for (auto& input : inputs) {
    if (!input.is_available()) input.eval();
    if (input.flags().row_contiguous) continue;
    input = mx::contiguous(input);
    input.eval();
  }
  for (size_t i = 0; i < shapes.size(); i++) outputs.emplace_back(shapes[i], types[i], nullptr, Arrays{});
  for (const auto& [from, to] : in_place) {
    has_memory[to] = true;
    if (inputs[from].is_donatable()) {
      outputs[to].copy_shared_buffer(inputs[from]);
      continue;
    }
    outputs[to].set_data(mx::allocator::malloc(outputs[to].nbytes()));
    std::memcpy(outputs[to].data<char>(), inputs[from].data<char>(), inputs[from].nbytes());
  }
  for (size_t i = 0; i < outputs.size(); i++) {
    if (!has_memory[i]) outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
    outputs[i].set_status(mx::array::Status::available);
  }
  work(inputs, outputs);
  return outputs;
}

// An operation with one output; `in_place`: which is the first input changed.
inline mx::array operation(const char* name, mx::Shape shape, Arrays inputs, Work work, bool in_place = false,
                           Takes takes = Takes::contiguous) {
  auto primitive = std::make_shared<Operation>(name, std::move(work), in_place ? Places{{0, 0}} : Places{}, takes);
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

// The place of matrix `index` of an array whose last two axes are matrices.
inline const float* matrix_at(const mx::array& x, size_t index) {
  int64_t offset = 0;
  for (int axis = static_cast<int>(x.ndim()) - 3; axis >= 0; axis--) {
    offset += int64_t(index % x.shape(axis)) * x.strides(axis);
    index /= x.shape(axis);
  }
  return x.data<float>() + offset;
}

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace weft
