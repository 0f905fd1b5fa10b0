// A model's decode step as two calls that compute at once: one from tokens to logits, and one that keeps what counts of each row's
// tokens and lets the MTP head guess the next ones.
//
// Included by primitives.cpp, which has what the weights of layers are kept in. Rows have as many tokens as they need: nothing is
// padded. Every number is computed by the functions that compute it where each part of a layer is an operation of its own, in the same
// order, so both ways have the same bits. What is saved is MLX's work for each operation, Python's for building it, and the time in
// which the pool's threads wait for the next one.
#pragma once

namespace weft {

// A decoder layer: norm, attention or a gated delta rule between two products, norm and gated MLP, the latter two with residuals.
struct DecoderLayer {
  NormPointer input_norm, mlp_norm;
  std::vector<WeightsPointer> joint;  // of all that the mixer takes
  WeightsPointer output, gate, up, down;
  std::shared_ptr<const Heads> heads;       // of attention, or none
  std::shared_ptr<const DeltaLayer> delta;  // or none
  size_t turns;                             // attention: which of the model's rotary positions

  size_t size() const { return output->n(); }
  size_t line() const { return heads ? line_width(*heads) : delta->line_width(); }
  size_t mixed() const { return output->k(); }
};

void require_layer(const DecoderLayer& layer) {
  require(bool(layer.heads) != bool(layer.delta), "a layer has attention or a gated delta rule");
  size_t width = 0;
  for (const auto& part : layer.joint) {
    require(part->k() == layer.size(), "the mixer takes products of hidden states");
    width += part->n();
  }
  require(width == layer.line(), "the joint product has the mixer's numbers");
  const size_t mixed = layer.heads ? layer.heads->heads * layer.heads->dim : layer.delta->get()->heads * layer.delta->get()->height;
  require(layer.mixed() == mixed, "the output product takes all heads");
  require(layer.gate->k() == layer.size() && layer.up->k() == layer.size() && layer.up->n() == layer.gate->n() &&
              layer.down->k() == layer.gate->n() && layer.down->n() == layer.size() && !layer.gate->bias() && !layer.up->bias(),
          "gate, up and down belong together");
  require(layer.input_norm->size() == layer.size() && layer.mlp_norm->size() == layer.size(), "the norms are as long as a hidden state");
}

// A layer as Python hands it over: its norm, joint weights, heads or delta rule, kind of positions, output, norm, gate, up and down.
using LayerParts = std::tuple<Handle<Norm>, std::vector<Handle<Weights>>, std::optional<Handle<Heads>>, std::optional<Handle<DeltaLayer>>, size_t,
                              Handle<Weights>, Handle<Norm>, Handle<Weights>, Handle<Weights>, Handle<Weights>>;

// Rotary positions: the rate of each frequency, and what positions are scaled by.
using Turns = std::pair<mx::array, float>;

struct FusedModel {
  WeightsPointer embedding, vocabulary;
  std::vector<DecoderLayer> layers;
  NormPointer norm;
  std::vector<Turns> turns;
  bool is_normed;  // hidden states are handed on behind the last norm

  size_t size() const { return norm->size(); }
};

std::shared_ptr<const FusedModel> make_model(const Handle<Weights>& embedding, const std::vector<LayerParts>& parts, const Handle<Norm>& norm,
                                             const Handle<Weights>& vocabulary, const std::vector<Turns>& turns, bool is_normed) {
  FusedModel model{embedding, vocabulary, {}, norm, {}, is_normed};
  for (const auto& [rates, scale] : turns) model.turns.emplace_back(settled(mx::astype(rates, mx::float32)), scale);
  for (const auto& [input_norm, joint, heads, delta, which, output, mlp_norm, gate, up, down] : parts) {
    model.layers.push_back({input_norm, mlp_norm, {joint.begin(), joint.end()}, output, gate, up, down, pointer_of(heads ? &*heads : nullptr),
                            pointer_of(delta ? &*delta : nullptr), which});
    const auto& layer = model.layers.back();
    require_layer(layer);
    require(layer.size() == model.size(), "all layers have one size");
    require(!layer.heads || (which < turns.size() && 2 * model.turns[which].first.size() <= layer.heads->dim), "every attention layer has its positions");
  }
  require(!model.layers.empty() && embedding->k() == model.size() && vocabulary->k() == model.size(), "hidden states have one size");
  return std::make_shared<const FusedModel>(std::move(model));
}

// The arrays of a list, taken out of it where it alone holds them: then their memory may be changed.
Arrays taken(nb::list held) {
  Arrays found;
  for (nb::handle item : held) {
    auto& array = nb::cast<mx::array&>(item);
    if (Py_REFCNT(item.ptr()) == 1)
      found.push_back(std::move(array));
    else
      found.push_back(array);
  }
  held.clear();
  return found;
}

// The rows of a step: their places, by row the position of the first new token, how many new ones are known, and the draft behind these.
struct FusedRows {
  StepRows places;
  std::vector<int> positions;
  std::vector<size_t> known;
  std::vector<std::vector<int>> drafts;

  size_t size() const { return positions.size(); }
  size_t tokens(size_t row) const { return known[row] + drafts[row].size(); }
  bool is_drafted(size_t row) const { return !drafts[row].empty(); }
  bool is_any_drafted() const {
    return std::any_of(drafts.begin(), drafts.end(), [](const auto& draft) { return !draft.empty(); });
  }
  // The lines that are sampled from: of each row the last known one, and those of its draft.
  std::vector<size_t> sampled() const {
    std::vector<size_t> lines;
    size_t line = 0;
    for (size_t row = 0; row < size(); line += tokens(row++))
      for (size_t place = known[row] - 1; place < tokens(row); place++) lines.push_back(line + place);
    return lines;
  }
};

// By row as Python hands it over: slab, slot, tokens it has, position, known new tokens, draft.
using FusedRow = std::tuple<size_t, size_t, size_t, int, size_t, std::vector<int>>;

std::shared_ptr<const FusedRows> make_rows(const std::vector<FusedRow>& rows) {
  std::vector<Row> places;
  std::vector<int> positions;
  std::vector<size_t> known;
  std::vector<std::vector<int>> drafts;
  size_t line = 0;
  for (const auto& [slab, slot, first, position, count, draft] : rows) {
    require(count > 0, "every row has a token");
    places.emplace_back(slab, slot, first, count + draft.size(), line);
    line += count + draft.size();
    positions.push_back(position), known.push_back(count), drafts.push_back(draft);
  }
  return std::make_shared<const FusedRows>(FusedRows{StepRows(places), std::move(positions), std::move(known), std::move(drafts)});
}

// What a layer's numbers are kept in from one product to the next; memory of the thread, so that no step asks for it again.
struct StepMemory {
  std::vector<float> x, normed, lines, mixed, middle, inner, state, channels, places;
  std::vector<std::vector<float>> angles;

  static StepMemory& get() {
    thread_local StepMemory memory;
    return memory;
  }
  static float* at_least(std::vector<float>& memory, size_t size) {
    if (memory.size() < size) memory.resize(size);
    return memory.data();
  }
};

// Attention of a layer's lines over its rows, whose keys and values are appended first; `found`: the rows with their memory.
void attend_layer(const DecoderLayer& layer, const std::vector<weft_row>& found, const float* lines, const float* turns, size_t half, float* mixed) {
  const Heads& h = *layer.heads;
  const size_t width = line_width(h);
  const Norm *q_norm = h.q_norm.get(), *k_norm = h.k_norm.get();
  const float* keys = lines + first_key(h);
  const struct weft_append new_keys{found.data(), found.size(), h.kv_heads, h.dim, width, half, keys, turns,
                                    k_norm ? k_norm->weight() : nullptr, k_norm ? k_norm->eps : 0.0f, h.of_neighbours};
  weft_append(&new_keys);
  auto places = found;
  for (auto& row : places) row.keys = row.values;
  const struct weft_append new_values{places.data(), places.size(), h.kv_heads, h.dim, width, 0, keys + h.kv_heads * h.dim, nullptr, nullptr, 0.0f,
                                      h.of_neighbours};
  weft_append(&new_values);
  const weft_attention attention{found.data(), found.size(), h.heads, h.kv_heads, h.dim, width, half, lines, turns,
                                 q_norm ? q_norm->weight() : nullptr, h.scale, q_norm ? q_norm->eps : 0.0f, h.of_neighbours, h.is_gated, mixed};
  weft_attend(&attention);
}

// Where a row's channels and states begin in the arrays of all rows.
struct RowStates {
  RowStates(const DeltaLayer& layer, float* columns, float* states, size_t row)
      : columns(columns + row * (layer.get()->taps - 1) * layer.channels()),
        states(states + row * layer.get()->heads * layer.get()->height * layer.get()->width) {}
  float *columns, *states;
};

// Rows [begin, end) with equally many known tokens and as long drafts, whose lines begin with `line`.
struct RowGroup {
  size_t begin, end, line;
};

std::vector<RowGroup> groups_of(const FusedRows& rows) {
  std::vector<RowGroup> groups;
  for (size_t row = 0, line = 0; row < rows.size(); line += rows.tokens(row++)) {
    const bool is_alike = row > 0 && rows.known[row] == rows.known[row - 1] && rows.drafts[row].size() == rows.drafts[row - 1].size();
    if (is_alike)
      groups.back().end++;
    else
      groups.push_back({row, row + 1, line});
  }
  return groups;
}

// The gated delta rule over the lines of all rows. Known tokens are counted: channels and states of a row are those behind them. Behind a
// draft they are left in memory of the thread: it is not known yet how many of its tokens count.
struct LayerRecurrence {
  const DeltaLayer& layer;
  const FusedRows& rows;
  std::vector<RowGroup> groups;
  const float* lines;
  float *columns, *states, *mixed;

  void compute(const RowGroup& group) const {
    const weft_delta_layer& its = *layer.get();
    const size_t count = group.end - group.begin, known = rows.known[group.begin], drafted = rows.drafts[group.begin].size();
    const RowStates own(layer, columns, states, group.begin);
    const float* first = lines + group.line * layer.line_width();
    float* output = mixed + group.line * its.heads * its.height;
    const struct weft_delta counted{&its, count, known, known + drafted, first, own.columns, own.states, own.states, own.columns, false, output};
    weft_delta(&counted);
    if (!drafted) return;
    StepMemory& memory = StepMemory::get();
    const struct weft_delta open{&its, count, drafted, known + drafted, first + known * layer.line_width(), own.columns, own.states,
                                 StepMemory::at_least(memory.state, count * its.heads * its.height * its.width),
                                 StepMemory::at_least(memory.channels, count * (its.taps - 1) * layer.channels()), false,
                                 output + known * its.heads * its.height};
    weft_delta(&open);
  }

  void compute_all() const {
    const weft_delta_layer& its = *layer.get();
    const auto work = [](const void* subject, size_t begin, size_t end) {
      const auto& self = *static_cast<const LayerRecurrence*>(subject);
      for (size_t i = begin; i < end; i++) self.compute(self.groups[i]);
    };
    if (groups.size() == 1)
      compute(groups[0]);
    else
      weft_share(work, this, groups.size(), 3 * rows.places.lines() * its.heads * its.height * its.width);
  }
};

// Draft tokens of a row that count, in one gated delta layer: `count` of them, the lines of which begin at `lines`.
struct Accepted {
  const DeltaLayer* layer;
  const float* lines;
  RowStates states;
  size_t count;
};

// Lets channels and states go on behind the draft tokens that count.
void go_on(const std::vector<Accepted>& accepted) {
  size_t multiplications = 0;
  for (const auto& one : accepted) multiplications += 3 * one.count * one.layer->get()->heads * one.layer->get()->height * one.layer->get()->width;
  const auto work = [](const void* subject, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
      const auto& [layer, lines, states, count] = (*static_cast<const std::vector<Accepted>*>(subject))[i];
      const struct weft_delta one{layer->get(), 1, count, count, lines, states.columns, states.states, states.states, states.columns, false, nullptr};
      weft_delta(&one);
    }
  };
  weft_share(work, &accepted, accepted.size(), multiplications);
}

// A table (rows, entries, H) of each row's last hidden states moves on by the first `count` of those from `from` on.
void move_on(float* table, size_t entries, size_t size, const float* from, size_t count) {
  const size_t moved = std::min(count, entries);
  std::memmove(table, table + moved * size, (entries - moved) * size * sizeof(float));
  std::memcpy(table + (entries - moved) * size, from + (count - moved) * size, moved * size * sizeof(float));
}

void require_table(const Optional& table, const FusedRows& rows, size_t size) {
  require(!table || (table->dtype() == mx::float32 && table->ndim() == 3 && size_t(table->shape(0)) == rows.size() && size_t(table->shape(2)) == size),
          "every row has its hidden states");
}

// Checks the memory of a step's rows in the layers, by layer the slabs of keys and those of values, or channels and states.
void require_memory(const FusedModel& model, const FusedRows& rows, const Arrays& memory) {
  const size_t slabs = rows.places.slabs();
  size_t at = 0;
  for (const auto& layer : model.layers) {
    const size_t count = layer.heads ? 2 * slabs : 2;
    require(at + count <= memory.size(), "every layer has its memory");
    const auto own = memory.begin() + at;
    if (layer.heads)
      require_slabs({own, own + slabs}, {own + slabs, own + 2 * slabs}, rows.places, *layer.heads);
    else
      delta_shapes(*layer.delta, own[0], own[1], static_cast<int>(rows.size()), 1, false);
    at += count;
  }
  require(at == memory.size(), "no layer has more memory than it needs");
}

// The angles of all lines, of each kind of rotary positions.
void compute_angles(const FusedModel& model, const FusedRows& rows, StepMemory& memory) {
  memory.places.clear(), memory.angles.resize(model.turns.size());
  for (size_t row = 0; row < rows.size(); row++)
    for (size_t token = 0; token < rows.tokens(row); token++) memory.places.push_back(static_cast<float>(rows.positions[row] + static_cast<int>(token)));
  for (size_t kind = 0; kind < model.turns.size(); kind++) {
    const auto& [rates, scale] = model.turns[kind];
    float* angles = StepMemory::at_least(memory.angles[kind], memory.places.size() * 2 * rates.size());
    const struct weft_angles one{memory.places.size(), rates.size(), memory.places.data(), rates.data<float>(), scale, true, angles};
    weft_angles(&one);
  }
}

// Hidden states x (m, H) of the rows' lines through a layer, in place; its mixer's output is in `memory.mixed`.
void finish_layer(const DecoderLayer& layer, float* x, size_t m, StepMemory& memory) {
  float* middle = StepMemory::at_least(memory.middle, m * layer.size());
  multiply(*layer.output, memory.mixed.data(), m, middle, layer.size(), x);
  normalise(*layer.mlp_norm, middle, m, memory.normed.data());
  const struct weft_gated mlp{m, memory.normed.data(), StepMemory::at_least(memory.inner, m * layer.gate->n()), layer.gate->get(), layer.up->get()};
  weft_gated(&mlp);
  multiply(*layer.down, memory.inner.data(), m, x, layer.size(), middle);
}

void embed_tokens(const FusedModel& model, const uint32_t* tokens, size_t m, float* x) {
  for (size_t line = 0; line < m; line++, x += model.size()) {
    if (tokens[line] < model.embedding->n())
      weft_expand(model.embedding->get(), tokens[line], x);
    else
      std::memset(x, 0, model.size() * sizeof(float));
  }
}

// A step's tokens (lines,), those of each row one after the other -> logits (sampled lines, V), hidden states (lines, H), the table of
// hidden states if there is one, the layers' memory, and if any row has a draft the lines of each gated delta layer. Slabs have the new
// tokens of all rows then; states and table are those behind the known tokens.
std::vector<mx::array> decode_step(const mx::array& tokens, const Handle<FusedRows>& rows, const Handle<FusedModel>& model, nb::list held, nb::list its_table) {
  Arrays memory = taken(held);
  Optional table;
  if (nb::len(its_table)) table = std::move(taken(its_table)[0]);
  const size_t m = rows->places.lines(), size = model->size();
  require(tokens.dtype() == mx::int32 && tokens.size() == m, "tokens are whole numbers, one of each line");
  require_memory(*model, *rows, memory);
  require_table(table, *rows, size);
  const auto sampled = rows->sampled();
  std::vector<mx::Shape> shapes{{int(sampled.size()), int(model->vocabulary->n())}, {int(m), int(size)}};
  Arrays inputs{tokens};
  Places in_place;
  const bool has_table = table.has_value();
  if (table) memory.insert(memory.begin(), std::move(*table)), table.reset();
  for (auto& array : memory) {
    in_place.emplace_back(inputs.size(), shapes.size());
    shapes.push_back(array.shape()), inputs.push_back(std::move(array));
  }
  const size_t first = shapes.size();
  if (rows->is_any_drafted())
    for (const auto& layer : model->layers)
      if (layer.delta) shapes.push_back({int(m), int(layer.line())});
  auto work = [rows, model, sampled, first, has_table](const Arrays& in, Arrays& out) {
    StepMemory& own = StepMemory::get();
    const size_t m = rows->places.lines(), size = model->size(), slabs = rows->places.slabs();
    float *x = StepMemory::at_least(own.x, m * size), *normed = StepMemory::at_least(own.normed, m * size);
    embed_tokens(*model, in[0].data<uint32_t>(), m, x);
    compute_angles(*model, *rows, own);
    const auto groups = groups_of(*rows);
    size_t at = 2 + has_table, kept = first;
    for (const auto& layer : model->layers) {
      const bool is_kept = layer.delta && out.size() > first;
      float* lines = is_kept ? out[kept++].data<float>() : StepMemory::at_least(own.lines, m * layer.line());
      float* mixed = StepMemory::at_least(own.mixed, m * layer.mixed());
      normalise(*layer.input_norm, x, m, normed);
      multiply_joint(layer.joint, normed, m, lines, layer.line());
      if (layer.heads)
        attend_layer(layer, rows->places.at(out, at, at + slabs), lines, own.angles[layer.turns].data(),
                     model->turns[layer.turns].first.size(), mixed);
      else
        LayerRecurrence{*layer.delta, *rows, groups, lines, out[at].data<float>(), out[at + 1].data<float>(), mixed}.compute_all();
      at += layer.heads ? 2 * slabs : 2;
      finish_layer(layer, x, m, own);
    }
    normalise(*model->norm, x, m, normed);
    std::memcpy(out[1].data<float>(), model->is_normed ? normed : x, m * size * sizeof(float));
    for (size_t i = 0; i < sampled.size(); i++) std::memmove(normed + i * size, normed + sampled[i] * size, size * sizeof(float));
    multiply(*model->vocabulary, normed, sampled.size(), out[0].data<float>(), model->vocabulary->n());
    for (size_t row = 0, line = 0; has_table && row < rows->size(); line += rows->tokens(row++)) {
      const size_t entries = out[2].shape(1);
      move_on(out[2].data<float>() + row * entries * size, entries, size, out[1].data<float>() + line * size, rows->known[row]);
    }
  };
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  nb::gil_scoped_release released;
  return compute_now(shapes, types, work, in_place, std::move(inputs));
}

// The slabs (slots, heads, places, dim) with zeros in places [first, last) of each of these slots, computed at once.
std::vector<mx::array> clear_places(nb::list held, const std::vector<std::tuple<size_t, size_t, size_t>>& ranges) {
  Arrays slabs = taken(held);
  std::vector<mx::Shape> shapes;
  Places in_place;
  for (const auto& slab : slabs) {
    require(slab.ndim() == 4 && slab.dtype() == mx::float32, "slabs have four axes of float32");
    for (const auto& [slot, first, last] : ranges)
      require(slot < size_t(slab.shape(0)) && first <= last && last <= size_t(slab.shape(2)), "places are a slot's");
    in_place.emplace_back(shapes.size(), shapes.size());
    shapes.push_back(slab.shape());
  }
  const auto work = [&ranges](const Arrays&, Arrays& out) {
    for (auto& slab : out)
      for (const auto& [slot, first, last] : ranges)
        for (size_t head = 0; head < size_t(slab.shape(1)); head++) {
          const size_t dim = slab.shape(3), start = (slot * slab.shape(1) + head) * slab.shape(2) * dim;
          std::memset(slab.data<float>() + start + first * dim, 0, (last - first) * dim * sizeof(float));
        }
  };
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  nb::gil_scoped_release released;
  return compute_now(shapes, types, work, in_place, std::move(slabs));
}

// How a row's guesses are drawn, and its random numbers, from the one behind its first sampled token on.
using GuessSampling = std::tuple<float, float, int32_t, float, std::vector<float>>;  // temperature, min_p, top_k, top_p, numbers

void choose_guesses(const std::vector<float>& logits, size_t n, const std::vector<GuessSampling>& how, const std::vector<size_t>& places, int32_t* tokens) {
  int32_t problem;
  for (size_t row = 0; row < how.size(); row++) {
    const auto& [temperature, min_p, top_k, top_p, numbers] = how[row];
    const float uniform = temperature > 0.0f ? numbers[places[row]] : 0.0f;
    const struct weft_choice one{1, n, &logits[row * n], nullptr, &temperature, &min_p, &top_p, &uniform, &top_k, tokens + row, &problem};
    weft_choose(&one);
  }
}

// The MTP head reads the tokens of each row that count, the sampled ones, and guesses `count` tokens behind them: guesses[i] (rows,).
void guess_behind(const MTPHead& head, const FusedRows& rows, const int32_t* sampled, const std::vector<size_t>& accepted, const float* hidden,
                  const std::vector<weft_row>& memory, const std::vector<GuessSampling>& how, const std::vector<int32_t*>& guesses) {
  std::vector<HeadToken> tokens;
  std::vector<weft_row> places = memory;
  for (size_t row = 0, line = 0; row < rows.size(); line += rows.tokens(row++)) {
    places[row].first += rows.known[row], places[row].tokens = accepted[row] + 1, places[row].line = tokens.size();
    for (size_t i = 0; i <= accepted[row]; i++)
      tokens.push_back({uint32_t(sampled[i]), hidden + (line + rows.known[row] - 1 + i) * head.size(), rows.positions[row] + int(rows.known[row] + i)});
    sampled += 1 + rows.drafts[row].size();
  }
  std::vector<float> state(rows.size() * head.size()), logits(rows.size() * head.vocabulary->n());
  std::vector<size_t> numbers = accepted;
  for (size_t guess = 0; guess < guesses.size(); guess++) {
    if (guess > 0) {
      const std::vector<float> before = state;
      std::vector<int> positions;
      for (const auto& row : places) positions.push_back(tokens[row.line + row.tokens - 1].position + 1);
      tokens.clear();
      for (size_t row = 0; row < rows.size(); row++) {
        places[row].first += places[row].tokens, places[row].tokens = 1, places[row].line = row;
        tokens.push_back({uint32_t(guesses[guess - 1][row]), &before[row * head.size()], positions[row]});
        numbers[row]++;
      }
      guess_from(head, tokens, places, state.data(), logits.data());
    } else {
      guess_from(head, tokens, places, state.data(), logits.data());
    }
    choose_guesses(logits, head.vocabulary->n(), how, numbers, guesses[guess]);
  }
}

// Behind `decode_step`, from its sampled tokens: by row how many draft tokens are accepted (B,), the channels and states of gated delta layers,
// and the table of hidden states, now those behind the tokens that count; then, with a head, its slabs, and the tokens that it guesses next,
// one array (B,) for each of `count`. `states`: by gated delta layer its lines, channels and states. `slabs`: the head's, of keys, then of values.
std::vector<mx::array> keep_step(const mx::array& sampled, const Handle<FusedRows>& rows, const Handle<FusedModel>& model, nb::list its_states,
                                 Optional hidden, nb::list its_table, const Handle<MTPHead>* its_head, nb::list its_slabs,
                                 const std::vector<GuessSampling>& how, int count) {
  Arrays states = taken(its_states), slabs = taken(its_slabs);
  Optional table;
  if (nb::len(its_table)) table = std::move(taken(its_table)[0]);
  const bool has_table = table.has_value();
  const size_t num_states = states.size(), num_slabs = slabs.size() / 2;
  const auto head = pointer_of(its_head);
  size_t lines = 0;
  for (const auto& draft : rows->drafts) lines += 1 + draft.size();
  require(sampled.dtype() == mx::int32 && sampled.size() == lines, "every draft token has a line, and so has the one behind");
  require_table(table, *rows, model->size());
  require(!table || (hidden && hidden->dtype() == mx::float32 && hidden->size() == rows->places.lines() * model->size()), "every line has its hidden state");
  std::vector<std::shared_ptr<const DeltaLayer>> layers;
  for (const auto& layer : model->layers)
    if (layer.delta) layers.push_back(layer.delta);
  require(states.empty() || states.size() == 3 * layers.size(), "every gated delta layer has lines, channels and states");
  std::vector<mx::Shape> shapes{{int(rows->size())}};
  std::vector<mx::Dtype> types{mx::int32};
  Arrays inputs{sampled};
  Places in_place;
  auto change = [&](mx::array& array) {
    in_place.emplace_back(inputs.size(), shapes.size());
    shapes.push_back(array.shape()), inputs.push_back(std::move(array)), types.push_back(mx::float32);
  };
  for (size_t i = 0; i < states.size(); i += 3) {
    require(states[i].size() == rows->places.lines() * layers[i / 3]->line_width(), "a layer's lines are those of the step");
    delta_shapes(*layers[i / 3], states[i + 1], states[i + 2], static_cast<int>(rows->size()), 1, false);
    inputs.push_back(states[i]);
    change(states[i + 1]), change(states[i + 2]);
  }
  if (has_table) inputs.push_back(*hidden), change(*table), table.reset();
  if (count > 0) {
    require(head && has_table && head->size() == model->size() && how.size() == rows->size(), "guesses are a head's");
    const size_t half = slabs.size() / 2;
    require_slabs({slabs.begin(), slabs.begin() + half}, {slabs.begin() + half, slabs.end()}, rows->places, *head->heads);
    for (size_t row = 0; row < rows->size(); row++) {
      require(std::get<0>(how[row]) == 0.0f || std::get<4>(how[row]).size() >= rows->drafts[row].size() + count, "every guess has its random number");
      require(rows->places.end(row) + count <= size_t(slabs[rows->places.slab(row)].shape(2)), "every guess has its place");
    }
    for (auto& slab : slabs) change(slab);
    for (int guess = 0; guess < count; guess++) shapes.push_back({int(rows->size())}), types.push_back(mx::int32);
  }
  auto work = [rows, model, head, layers, how, count, num_states, has_table, num_slabs](const Arrays& in, Arrays& out) {
    const int32_t *next = in[0].data<int32_t>(), *first = next;
    std::vector<size_t> accepted;
    for (size_t row = 0; row < rows->size(); next += 1 + rows->drafts[row++].size()) {
      const auto& draft = rows->drafts[row];
      size_t right = 0;
      while (right < draft.size() && next[right] == draft[right]) right++;
      accepted.push_back(right);
      out[0].data<int32_t>()[row] = static_cast<int32_t>(right);
    }
    size_t to = 1;
    std::vector<Accepted> further;
    for (size_t i = 0; i < num_states; i += 3, to += 2)
      for (size_t row = 0, line = 0; row < rows->size(); line += rows->tokens(row++)) {
        const DeltaLayer& layer = *layers[i / 3];
        const float* lines = in[1 + i].data<float>() + (line + rows->known[row]) * layer.line_width();
        if (accepted[row]) further.push_back({&layer, lines, {layer, out[to].data<float>(), out[to + 1].data<float>(), row}, accepted[row]});
      }
    go_on(further);
    if (!has_table) return;
    const float* hidden = in[1 + num_states].data<float>();
    const size_t size = model->size(), entries = out[to].shape(1);
    for (size_t row = 0, line = 0; row < rows->size(); line += rows->tokens(row++))
      move_on(out[to].data<float>() + row * entries * size, entries, size, hidden + (line + rows->known[row]) * size, accepted[row]);
    if (count == 0) return;
    const size_t slabs = ++to;
    std::vector<int32_t*> guesses;
    for (int guess = 0; guess < count; guess++) guesses.push_back(out[slabs + 2 * num_slabs + guess].data<int32_t>());
    guess_behind(*head, *rows, first, accepted, hidden, rows->places.at(out, slabs, slabs + num_slabs), how, guesses);
  };
  nb::gil_scoped_release released;
  return compute_now(shapes, types, work, in_place, std::move(inputs));
}

}  // namespace weft
