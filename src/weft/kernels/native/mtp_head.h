// An MTP head's guess: by itself, and as two operations of MLX's graph, one before and one behind the writing of its keys and values.
//
// Included by primitives.cpp, which has what the weights of layers are kept in. Of the tokens that the head reads every one has
// keys and values, but only the last that counts is guessed from: attention, MLP and vocabulary are computed for that one alone.
#pragma once

namespace weft {

// The weights of a head: of embeddings and vocabulary, which are the trunk's, and of its own norms, projection and layer.
struct MTPHead {
  WeightsPointer embedding, projection, output, down, vocabulary;
  std::vector<WeightsPointer> joint, inward;                                  // of queries, keys and values; of gate and up
  NormPointer embedding_norm, hidden_norm, input_norm, mlp_norm, output_norm;  // the last may be none
  std::shared_ptr<const Heads> heads;
  mx::array rates;  // of rotary positions
  float scale;
  bool hidden_first;  // the projection reads the hidden state before the embedding
  bool is_normed;     // hidden states are handed on behind the output norm

  size_t size() const { return projection->n(); }
};

void require_head(const MTPHead& head) {
  const size_t size = head.size();
  size_t width = 0, inner = 0;
  for (const auto& part : head.joint) {
    require(part->k() == size, "queries, keys and values are made of hidden states");
    width += part->n();
  }
  require(head.embedding->k() == size && head.vocabulary->k() == size && head.projection->k() == 2 * size, "hidden states have one size");
  require(head.output->n() == size && head.output->k() == head.heads->heads * head.heads->dim, "the output product takes all heads");
  for (const auto& part : head.inward) {
    require(part->k() == size, "gate and up are made of hidden states");
    inner += part->n();
  }
  require(2 * head.down->k() == inner && head.down->n() == size, "gate, up and down belong together");
  for (const auto& norm : {head.embedding_norm, head.hidden_norm, head.input_norm, head.mlp_norm, head.output_norm})
    require(!norm || norm->size() == size, "the norms are as long as a hidden state");
  require(width == line_width(*head.heads) && 2 * head.rates.size() <= head.heads->dim, "the joint product has the heads' numbers");
}

void normalise(const Norm& norm, const float* from, size_t m, float* to) { weft_norm(from, norm.weight(), norm.eps, to, m, norm.size()); }

// Products of guesses need not be exact.
void multiply_roughly(const Weights& weights, const float* rows, size_t m, float* found, size_t stride, const float* residual = nullptr) {
  const struct weft_linear one{m, weights.k(), stride, rows, weights.bias(), residual, found, weights.get()};
  weft_rough(&one);
}

void multiply_roughly(const std::vector<WeightsPointer>& parts, const float* rows, size_t m, float* found, size_t stride) {
  for (const auto& part : parts) {
    multiply_roughly(*part, rows, m, found, stride);
    found += part->n();
  }
}

// A token that a head reads: with the hidden state of the one before, at its rotary position.
struct HeadToken {
  uint32_t token;
  const float* hidden;
  int position;
};

// What the head's layer makes of tokens before attention: of each a line of queries, keys and values, a hidden state (H), and angles (2 * half).
void read_tokens(const MTPHead& head, const std::vector<HeadToken>& tokens, float* lines, float* states, float* angles) {
  const size_t size = head.size(), count = tokens.size();
  std::vector<float> both(count * 2 * size), normed(count * size), places(count);
  for (size_t i = 0; i < count; i++) {
    float *embedded = &both[i * 2 * size + (head.hidden_first ? size : 0)], *before = &both[i * 2 * size + (head.hidden_first ? 0 : size)];
    if (tokens[i].token < head.embedding->n()) weft_expand(head.embedding->get(), tokens[i].token, embedded);
    normalise(*head.embedding_norm, embedded, 1, embedded);
    normalise(*head.hidden_norm, tokens[i].hidden, 1, before);
    places[i] = static_cast<float>(tokens[i].position);
  }
  multiply_roughly(*head.projection, both.data(), count, states, size);
  normalise(*head.input_norm, states, count, normed.data());
  multiply_roughly(head.joint, normed.data(), count, lines, line_width(*head.heads));
  const struct weft_angles turns{count, head.rates.size(), places.data(), head.rates.data<float>(), head.scale, true, angles};
  weft_angles(&turns);
}

// Of each row the state (rows, H) and the logits (rows, V) of the guess behind its one token, whose line, state and angles are given, and whose
// keys and values its memory has already.
void guess_next(const MTPHead& head, const std::vector<weft_row>& rows, const float* lines, const float* states, const float* angles, float* state,
                float* logits) {
  const Heads& h = *head.heads;
  const size_t size = head.size(), m = rows.size(), width = h.heads * h.dim, height = head.down->k();
  size_t num_lines = 0;
  for (const auto& row : rows) num_lines = std::max(num_lines, row.line + 1);
  std::vector<float> mixed(num_lines * width), own(m * width), before(m * size), x(m * size), both(m * 2 * height), inner(m * height);
  const Norm* norm = h.q_norm.get();
  const weft_attention attention{rows.data(), m, h.heads, h.kv_heads, h.dim, line_width(h), head.rates.size(), lines, angles,
                                 norm ? norm->weight() : nullptr, h.scale, norm ? norm->eps : 0.0f, h.of_neighbours, h.is_gated, mixed.data()};
  weft_attend(&attention);
  for (size_t row = 0; row < m; row++) {
    std::memcpy(&own[row * width], &mixed[rows[row].line * width], width * sizeof(float));
    std::memcpy(&before[row * size], states + rows[row].line * size, size * sizeof(float));
  }
  multiply_roughly(*head.output, own.data(), m, x.data(), size, before.data());
  normalise(*head.mlp_norm, x.data(), m, before.data());
  multiply_roughly(head.inward, before.data(), m, both.data(), 2 * height);
  for (size_t row = 0; row < m; row++) {
    const float *gate = &both[row * 2 * height], *up = gate + height;
    weft_silu(gate, &inner[row * height], height);
    for (size_t i = 0; i < height; i++) inner[row * height + i] *= up[i];
  }
  multiply_roughly(*head.down, inner.data(), m, state, size, x.data());
  const float* guessed = state;
  if (head.output_norm) {
    normalise(*head.output_norm, state, m, head.is_normed ? state : x.data());
    guessed = head.is_normed ? state : x.data();
  }
  multiply_roughly(*head.vocabulary, guessed, m, logits, head.vocabulary->n());
}

// The head reads the tokens of each row, those from its line on, appends their keys and values, and guesses behind the last of each row.
void guess_from(const MTPHead& head, const std::vector<HeadToken>& tokens, std::vector<weft_row> rows, float* state, float* logits) {
  const Heads& h = *head.heads;
  const size_t width = line_width(h), half = head.rates.size();
  std::vector<float> lines(tokens.size() * width), states(tokens.size() * head.size()), angles(tokens.size() * 2 * half);
  read_tokens(head, tokens, lines.data(), states.data(), angles.data());
  const Norm* norm = h.k_norm.get();
  const float* keys = lines.data() + first_key(h);
  const struct weft_append new_keys{rows.data(), rows.size(), h.kv_heads, h.dim, width, half, keys, angles.data(),
                                    norm ? norm->weight() : nullptr, norm ? norm->eps : 0.0f, h.of_neighbours};
  weft_append(&new_keys);
  auto places = rows;
  for (auto& row : places) row.keys = row.values;
  const struct weft_append new_values{places.data(), places.size(), h.kv_heads, h.dim, width, 0, keys + h.kv_heads * h.dim, nullptr, nullptr, 0.0f,
                                      h.of_neighbours};
  weft_append(&new_values);
  for (auto& row : rows) row.first += row.tokens - 1, row.line += row.tokens - 1, row.tokens = 1;
  guess_next(head, rows, lines.data(), states.data(), angles.data(), state, logits);
}

// What the head's layer makes of tokens (B, T) before attention: lines (B, T, line) of queries, keys and values, its hidden
// states (B, T, H), and the angles (B, 1, T, 2 * half) of their positions, from `offsets` (B,) on. `hidden` (B, N, H) are states of
// earlier tokens; a row's entry starts[row] is of the one before its first token. Tokens may be (B,): one of each row.
std::vector<mx::array> head_lines(const mx::array& tokens, const mx::array& hidden, std::vector<size_t> starts, const mx::array& offsets,
                                  const Handle<MTPHead>& head) {
  require(tokens.ndim() > 0 && tokens.ndim() <= 2 && tokens.dtype() == mx::int32 && offsets.dtype() == mx::int32, "tokens and positions are whole numbers");
  require_numbers(hidden, head->size());
  const int rows = tokens.shape(0), count = tokens.ndim() == 1 ? 1 : tokens.shape(1), half = static_cast<int>(head->rates.size());
  require(hidden.ndim() == 3 && hidden.shape(0) == rows && hidden.shape(1) > 0 && starts.size() == size_t(rows) && offsets.size() == size_t(rows),
          "every row has its hidden states and its position");
  auto work = [head, starts, count](const Arrays& in, Arrays& out) {
    const size_t size = head->size(), kept = in[1].shape(1);
    std::vector<HeadToken> read;
    for (size_t line = 0; line < in[0].size(); line++) {
      const size_t row = line / count, place = std::min(starts[row] + line % count, kept - 1);
      read.push_back({in[0].data<uint32_t>()[line], in[1].data<float>() + (row * kept + place) * size,
                      in[2].data<int32_t>()[row] + static_cast<int>(line % count)});
    }
    read_tokens(*head, read, out[0].data<float>(), out[1].data<float>(), out[2].data<float>());
  };
  Arrays inputs{tokens, hidden, offsets};
  return mx::array::make_arrays({{rows, count, int(line_width(*head->heads))}, {rows, count, int(head->size())}, {rows, 1, count, 2 * half}},
                                {mx::float32, mx::float32, mx::float32}, std::make_shared<Operation>("weft.head_lines", std::move(work)),
                                std::move(inputs));
}

// Of each row the state (B, 1, H) and the logits (B, V) of the head's guess behind token chosen[row] of those that `lines` are of (none: the
// last), whose keys and values the slabs have already.
std::vector<mx::array> head_guess(const mx::array& lines, const mx::array& states, const mx::array& angles, Arrays keys, Arrays values,
                                  const Handle<StepRows>& rows, const Handle<MTPHead>& head, Optional chosen) {
  require_lines(lines, *head->heads, *rows, angles);
  require(!chosen || (chosen->dtype() == mx::int32 && chosen->size() == rows->size()), "one token of every row is guessed from");
  require_numbers(states, head->size());
  require_slabs(keys, values, *rows, *head->heads);
  require(lines.ndim() == 3 && size_t(lines.shape(0)) == rows->size() && lines_of(states) == rows->lines(), "every row has as many tokens");
  const size_t num_slabs = keys.size(), tokens = lines.shape(1);
  Arrays inputs{lines, states, angles};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  const bool is_chosen = chosen.has_value();
  if (is_chosen) inputs.push_back(*chosen);
  auto work = [rows, head, num_slabs, tokens, is_chosen](const Arrays& in, Arrays& out) {
    const size_t last = 3 + 2 * num_slabs;
    auto found = rows->at(in, 3, 3 + num_slabs);
    for (size_t row = 0; row < found.size(); row++) {
      const size_t place = is_chosen ? std::min<size_t>(std::max(in[last].data<int32_t>()[row], 0), tokens - 1) : tokens - 1;
      found[row].first += place, found[row].line += place, found[row].tokens = 1;
    }
    guess_next(*head, found, in[0].data<float>(), in[1].data<float>(), in[2].data<float>(), out[0].data<float>(), out[1].data<float>());
  };
  const int m = static_cast<int>(rows->size());
  return mx::array::make_arrays({{m, 1, int(head->size())}, {m, int(head->vocabulary->n())}}, {mx::float32, mx::float32},
                                std::make_shared<Operation>("weft.head_guess", std::move(work)), std::move(inputs));
}

}  // namespace weft
