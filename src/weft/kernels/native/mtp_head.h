// An MTP head's guess as two operations of MLX's graph, one before and one behind the writing of its keys and values, and the
// counting of the draft tokens that a step accepts.
//
// Included by primitives.cpp, which has what the weights of layers are kept in. Of the tokens that the head reads every one has
// keys and values, but only the last that counts is guessed from: attention, MLP and vocabulary are computed for that one alone.
#pragma once

namespace weft {

using WeightsPointer = std::shared_ptr<const Weights>;

// The weights of a head: of embeddings and vocabulary, which are the trunk's, and of its own norms, projection and layer.
struct MTPHead {
  WeightsPointer embedding, projection, output, gate, up, down, vocabulary;
  std::vector<WeightsPointer> joint;                                          // of queries, keys and values
  NormPointer embedding_norm, hidden_norm, input_norm, mlp_norm, output_norm;  // the last may be none
  std::shared_ptr<const Heads> heads;
  mx::array rates;  // of rotary positions
  float scale;
  bool hidden_first;  // the projection reads the hidden state before the embedding
  bool is_normed;     // hidden states are handed on behind the output norm

  size_t size() const { return projection->n(); }
};

void require_head(const MTPHead& head) {
  const size_t size = head.size(), inner = head.gate->n();
  size_t width = 0;
  for (const auto& part : head.joint) {
    require(part->k() == size, "queries, keys and values are made of hidden states");
    width += part->n();
  }
  require(head.embedding->k() == size && head.vocabulary->k() == size && head.projection->k() == 2 * size, "hidden states have one size");
  require(head.output->n() == size && head.output->k() == head.heads->heads * head.heads->dim, "the output product takes all heads");
  require(head.gate->k() == size && head.up->k() == size && head.up->n() == inner && head.down->k() == inner && head.down->n() == size,
          "gate, up and down belong together");
  for (const auto& norm : {head.embedding_norm, head.hidden_norm, head.input_norm, head.mlp_norm, head.output_norm})
    require(!norm || norm->size() == size, "the norms are as long as a hidden state");
  require(width == line_width(*head.heads) && 2 * head.rates.size() <= head.heads->dim, "the joint product has the heads' numbers");
}

void multiply(const Weights& weights, const float* rows, size_t m, float* found, size_t stride, const float* residual = nullptr) {
  const struct weft_linear one{m, weights.k(), stride, rows, weights.bias(), residual, found, weights.get()};
  weft_linear(&one);
}

void normalise(const Norm& norm, const float* from, size_t m, float* to) { weft_norm(from, norm.weight(), norm.eps, to, m, norm.size()); }

// What the head's layer makes of tokens (B, T) before attention: lines (B, T, line) of queries, keys and values, its hidden
// states (B, T, H), and the angles (B, 1, T, 2 * half) of their positions, from `offsets` (B,) on. `hidden` (B, N, H) are states of
// earlier tokens; a row's entry starts[row] is of the one before its first token. Tokens may be (B,): one of each row. `ahead` (B,):
// how many positions further on a row's tokens are.
std::vector<mx::array> head_lines(const mx::array& tokens, const mx::array& hidden, std::vector<size_t> starts, const mx::array& offsets,
                                  const Handle<MTPHead>& head, Optional ahead) {
  require(tokens.ndim() > 0 && tokens.ndim() <= 2 && tokens.dtype() == mx::int32 && offsets.dtype() == mx::int32, "tokens and positions are whole numbers");
  require(!ahead || (ahead->dtype() == mx::int32 && ahead->size() == size_t(tokens.shape(0))), "every row is a whole number of tokens ahead");
  require_numbers(hidden, head->size());
  const int rows = tokens.shape(0), count = tokens.ndim() == 1 ? 1 : tokens.shape(1), half = static_cast<int>(head->rates.size());
  require(hidden.ndim() == 3 && hidden.shape(0) == rows && hidden.shape(1) > 0 && starts.size() == size_t(rows) && offsets.size() == size_t(rows),
          "every row has its hidden states and its position");
  auto work = [head, starts, count](const Arrays& in, Arrays& out) {
    const size_t size = head->size(), lines = in[0].size(), kept = in[1].shape(1), width = line_width(*head->heads);
    std::vector<float> both(lines * 2 * size), normed(lines * size), places(lines);
    for (size_t line = 0; line < lines; line++) {
      const size_t row = line / count, place = std::min(starts[row] + line % count, kept - 1);
      const uint32_t token = in[0].data<uint32_t>()[line];
      float* embedded = &both[line * 2 * size + (head->hidden_first ? size : 0)];
      if (token < head->embedding->n()) weft_expand(head->embedding->get(), token, embedded);
      normalise(*head->embedding_norm, embedded, 1, embedded);
      normalise(*head->hidden_norm, in[1].data<float>() + (row * kept + place) * size, 1, &both[line * 2 * size + (head->hidden_first ? 0 : size)]);
      const int32_t further = in.size() > 3 ? in[3].data<int32_t>()[row] : 0;
      places[line] = static_cast<float>(in[2].data<int32_t>()[row] + further + static_cast<int>(line % count));
    }
    multiply(*head->projection, both.data(), lines, out[1].data<float>(), size);
    normalise(*head->input_norm, out[1].data<float>(), lines, normed.data());
    float* joint = out[0].data<float>();
    for (const auto& part : head->joint) {
      multiply(*part, normed.data(), lines, joint, width);
      joint += part->n();
    }
    const struct weft_turns turns{lines, head->rates.size(), places.data(), head->rates.data<float>(), head->scale, true, out[2].data<float>()};
    weft_turn(&turns);
  };
  Arrays inputs{tokens, hidden, offsets};
  if (ahead) inputs.push_back(*ahead);
  return mx::array::make_arrays({{rows, count, int(line_width(*head->heads))}, {rows, count, int(head->size())}, {rows, 1, count, 2 * half}},
                                {mx::float32, mx::float32, mx::float32}, std::make_shared<Operation>("weft.head_lines", std::move(work)),
                                std::move(inputs));
}

// Of each row the state (B, 1, H) and the logits (B, V) of the head's guess behind token chosen[row] of those that `lines` are of (none: the
// last), whose keys and values the slabs have already.
std::vector<mx::array> head_guess(const mx::array& lines, const mx::array& states, const mx::array& angles, Arrays keys, Arrays values,
                                  const Handle<StepRows>& rows, const Handle<MTPHead>& head, Optional chosen, Optional ahead) {
  require_lines(lines, *head->heads, *rows, angles);
  require_ahead(ahead, *rows);
  require_ahead(chosen, *rows);
  require_numbers(states, head->size());
  require_slabs(keys, values, *rows, *head->heads);
  require(lines.ndim() == 3 && size_t(lines.shape(0)) == rows->size() && lines_of(states) == rows->lines(), "every row has as many tokens");
  const size_t num_slabs = keys.size(), tokens = lines.shape(1);
  Arrays inputs{lines, states, angles};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  const bool is_chosen = chosen.has_value(), is_ahead = ahead.has_value();
  if (is_chosen) inputs.push_back(*chosen);
  if (is_ahead) inputs.push_back(*ahead);
  auto work = [rows, head, num_slabs, tokens, is_chosen, is_ahead](const Arrays& in, Arrays& out) {
    const Heads& h = *head->heads;
    const size_t size = head->size(), m = rows->size(), width = h.heads * h.dim, last = 3 + 2 * num_slabs;
    auto found = rows->at(in, 3, 3 + num_slabs, std::nullopt, is_ahead ? in.back().data<int32_t>() : nullptr);
    std::vector<float> mixed(rows->lines() * width), own(m * width), before(m * size), x(m * size), inner(m * head->gate->n());
    for (size_t row = 0; row < m; row++) {
      const size_t place = is_chosen ? std::min<size_t>(std::max(in[last].data<int32_t>()[row], 0), tokens - 1) : tokens - 1;
      found[row].first += place, found[row].line += place, found[row].tokens = 1;
    }
    const Norm* norm = h.q_norm.get();
    const weft_attention attention{found.data(), m, h.heads, h.kv_heads, h.dim, line_width(h), head->rates.size(), in[0].data<float>(),
                                   in[2].data<float>(), norm ? norm->weight() : nullptr, h.scale, norm ? norm->eps : 0.0f, h.of_neighbours,
                                   h.is_gated, mixed.data()};
    weft_attend(&attention);
    for (size_t row = 0; row < m; row++) {
      std::memcpy(&own[row * width], &mixed[found[row].line * width], width * sizeof(float));
      std::memcpy(&before[row * size], in[1].data<float>() + found[row].line * size, size * sizeof(float));
    }
    multiply(*head->output, own.data(), m, x.data(), size, before.data());
    normalise(*head->mlp_norm, x.data(), m, before.data());
    const struct weft_gated mlp{m, before.data(), inner.data(), head->gate->get(), head->up->get()};
    weft_gated(&mlp);
    float* state = out[0].data<float>();
    multiply(*head->down, inner.data(), m, state, size, x.data());
    const float* guessed = state;
    if (head->output_norm) {
      normalise(*head->output_norm, state, m, head->is_normed ? state : x.data());
      guessed = head->is_normed ? state : x.data();
    }
    multiply(*head->vocabulary, guessed, m, out[1].data<float>(), head->vocabulary->n());
  };
  const int m = static_cast<int>(rows->size());
  return mx::array::make_arrays({{m, 1, int(head->size())}, {m, int(head->vocabulary->n())}}, {mx::float32, mx::float32},
                                std::make_shared<Operation>("weft.head_guess", std::move(work)), std::move(inputs));
}

// How a step's sampled tokens (lines,) go on as the rows' drafts: (B, T) tokens, of which those behind a shorter draft repeat its last, and
// how many of each draft's tokens are accepted (B,). Where a row has random numbers, of positions from its first new token on, there are
// further outputs: of each of `count` guesses behind the accepted ones the rows' numbers (B,).
std::vector<mx::array> accepted(const mx::array& lines, std::vector<std::vector<int>> drafts, int tokens, std::vector<std::vector<float>> numbers,
                                int count) {
  size_t total = 0;
  for (const auto& draft : drafts) {
    require(draft.size() < size_t(tokens), "a draft has fewer tokens than a row");
    total += 1 + draft.size();
  }
  require(lines.dtype() == mx::int32 && lines.size() == total, "every draft token has a line, and so has the one behind");
  require(numbers.empty() || numbers.size() == drafts.size(), "every row has its random numbers");
  for (const auto& row : numbers) require(row.size() >= size_t(tokens - 1 + count), "every guess has its random number");
  const int rows = static_cast<int>(drafts.size());
  std::vector<mx::Shape> shapes{{rows, tokens}, {rows}};
  std::vector<mx::Dtype> types{mx::int32, mx::int32};
  for (int guess = 0; guess < (numbers.empty() ? 0 : count); guess++) shapes.push_back({rows}), types.push_back(mx::float32);
  auto work = [drafts = std::move(drafts), tokens, numbers = std::move(numbers)](const Arrays& in, Arrays& out) {
    const int32_t* sampled = in[0].data<int32_t>();
    for (size_t row = 0; row < drafts.size(); row++) {
      const auto& draft = drafts[row];
      int32_t* to = out[0].data<int32_t>() + row * tokens;
      for (size_t place = 0; place < size_t(tokens); place++) to[place] = sampled[std::min(place, draft.size())];
      int32_t right = 0;
      while (size_t(right) < draft.size() && sampled[right] == draft[right]) right++;
      out[1].data<int32_t>()[row] = right;
      for (size_t guess = 0; guess + 2 < out.size(); guess++) out[2 + guess].data<float>()[row] = numbers[row][right + guess];
      sampled += 1 + draft.size();
    }
  };
  return mx::array::make_arrays(std::move(shapes), types, std::make_shared<Operation>("weft.accepted", std::move(work)), {lines});
}

}  // namespace weft
