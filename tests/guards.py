"""Guards: lines of src/weft that keep a promise, each with a mutant that breaks it and the test that must then fail.

`make mutants` runs them (`mutants.py`). A guard stands for requirements of docs/requirements.md (R…), or for the cause of one of
the five reports that these come from: 0, a provider that crashed when it batched a hybrid model; 1, eight requests with a grammar
that came back empty; 2, batches and prefixes of hybrid models; 3, samplers and constraints that slipped to other rows; 4, chunked
prefill. Many guards of the batch are also found by the trial at load: the model is then served row by row, which
`test_a_model_is_held_the_best_way_that_is_right` sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Guard:
    """A text of a source file that keeps a promise, the mutant to put in its place, and the test that must turn red."""

    name: str
    file: str  # below src/weft
    text: str  # exactly once in the file
    mutant: str
    test: str  # pytest's name of it, from the repository's root
    why: str  # the promise
    stands_for: str = ""  # requirements, and the report whose cause it keeps out

    def path(self, source: Path) -> Path:
        return source / "weft" / self.file


# fmt: off
GUARDS = [
    # Rows in the batch.
    Guard(
        "poisoned-slot", "memory/slabs.py",
        "            slab.scrub(row.slot)",
        "            pass",
        "tests/engine/test_engine.py::test_the_next_tenant_of_a_poisoned_slot_is_not_poisoned",
        "a slot is zeroed after a row whose numbers were not finite", "R024",
    ),
    Guard(
        "table-order", "memory/slabs.py",
        "{row: index for index, row in enumerate(self.rows)}",
        "{row: index for index, row in enumerate(rows)}",
        "tests/memory/test_slabs.py::test_the_table_follows_its_rows_through_any_order",
        "recurrent states follow their rows when the order changes", "R004 R012 R013",
    ),
    Guard(
        "table-of-equal-size", "memory/slabs.py",
        "        if rows == self.rows:\n",
        "        if len(rows) == len(self.rows):\n",
        "tests/server/test_crowd.py::test_ten_requests_by_three_twenty_times_are_answered_as_alone_by_one_engine",
        "a table of another batch is not taken because it has the right size", "R001 R007, report 0",
    ),
    Guard(
        "leaving-states", "memory/slabs.py",
        "                row.loose = self.extract(row)",
        "                pass",
        "tests/memory/test_slabs.py::test_the_table_follows_its_rows_through_any_order",
        "a live row that sits a step out keeps its recurrent states", "R013",
    ),
    Guard(
        "slot-held-twice", "memory/slabs.py",
        "        slab.rows[row.slot] = row\n",
        "        pass\n",
        "tests/memory/test_slabs.py::test_no_order_of_joining_growing_and_leaving_mixes_rows_up",
        "no slot is given to two rows", "R013",
    ),
    Guard(
        "ring-order", "memory/slabs.py",
        "            start = first % places",
        "            start = 0",
        "tests/memory/test_slabs.py::test_a_seated_row_holds_its_own_tokens",
        "a window's tokens lie at their position modulo its size", "R008",
    ),
    Guard(
        "ring-append", "memory/views.py",
        "slot, place = part.rows[0].slot, part.rows[0].length % places",
        "slot, place = part.rows[0].slot, min(part.rows[0].length, places - 1)",
        "tests/model/test_adapter.py::test_a_model_is_held_the_best_way_that_is_right[gemma3n-seam-]",
        "a new token takes the place of the oldest one of its window", "R008 R048",
    ),
    Guard(
        "row-length-mask", "memory/views.py",
        "allowed = (position >= 0) & (position <= lengths)",
        "allowed = (position >= 0) & (position <= mx.max(lengths))",
        "tests/model/test_adapter.py::test_a_model_is_held_the_best_way_that_is_right[llama-seam-]",
        "a row attends to its own tokens, not to its neighbour's length", "R018",
    ),
    Guard(
        "row-offsets", "memory/views.py",
        "mx.array([0 if row is None else row.length for row in rows], mx.int32)",
        "mx.array([rows[0].length for row in rows], mx.int32)",
        "tests/model/test_adapter.py::test_a_model_is_held_the_best_way_that_is_right[llama-seam-]",
        "each row has its own position", "R007 R015",
    ),
    Guard(
        "gather", "memory/views.py",
        "self.gather = mx.array([row.slot - self.low for row in rows], mx.int32)",
        "self.gather = mx.array([*range(len(rows))], mx.int32)",
        "tests/oracle/test_alone_in_a_crowd.py::test_fifty_random_joins_and_leaves_change_nobody[llama]",
        "where slots lie empty between rows, each row's output is its own", "R013 R018",
    ),
    Guard(
        "spread", "memory/views.py",
        "mx.array([order.get(slot, 0) for slot in range(self.low, self.high)], mx.int32)",
        "mx.array([min(slot - self.low, len(rows) - 1) for slot in range(self.low, self.high)], mx.int32)",
        "tests/oracle/test_alone_in_a_crowd.py::test_fifty_random_joins_and_leaves_change_nobody[llama]",
        "where slots lie empty between rows, each slot has its own row's query", "R013 R018",
    ),
    Guard(
        "moving-states", "memory/slabs.py",
        "            row.loose = table.extract(row)\n",
        "            pass\n",
        "tests/oracle/test_alone_in_a_crowd.py::test_fifty_random_joins_and_leaves_change_nobody[plamo2]",
        "a row that moves to a larger slot takes its recurrent states along", "R013",
    ),
    Guard(
        "angles-of-a-step", "kernels/cpu.py",
        "            is_here = known is offset or",
        "            is_here = getattr(known, 'shape', 0) == getattr(offset, 'shape', 1) or known is offset or",
        "tests/kernels/test_attention.py::test_norms_and_positions_are_what_mlx_says",
        "positions kept on the model are not those of an earlier batch of the same size", "R007, report 0",
    ),
    Guard(
        "geometry", "memory/slabs.py",
        "            if reason := mismatch(spec, content, length):",
        "            if reason := None:",
        "tests/memory/test_slabs.py::test_what_does_not_have_the_geometry_is_refused_by_name",
        "states of another geometry never enter the batch", "R002 R003",
    ),
    Guard(
        "probe-leak", "model/probe.py",
        "        reason = probe.find_leak() or ",
        "        reason = (probe.find_leak() and None) or ",
        "tests/model/test_adapter.py::test_a_model_that_keeps_state_for_rows_of_equal_length_is_refused",
        "a model that keeps state between requests is not served", "R007, report 0",
    ),
    Guard(
        "probe-equal-length", "model/probe.py",
        "PROBE_LENGTHS = (9, 5, 9, 40)",
        "PROBE_LENGTHS = (9, 5, 7, 40)",
        "tests/model/test_adapter.py::test_a_model_that_keeps_state_for_rows_of_equal_length_is_refused",
        "a model that keeps state by the length of a row is not served", "R007, report 0",
    ),
    Guard(
        "inputs-by-row", "engine/runner.py",
        "{id(sequence): index for index, sequence in enumerate(last.sequences)}",
        "{id(sequence): index for index, sequence in enumerate(filter(None, sequences))}",
        "tests/oracle/test_alone_in_a_crowd.py::test_pipelined_turns_give_the_tokens_of_plain_ones[llama]",
        "a row's input is its own last token, wherever it stood in the step before", "R006 R074",
    ),
    Guard(
        "forget-preempted", "engine/order.py",
        "            self.pending.new.discard(sequence)\n",
        "            pass\n",
        "tests/engine/test_budget.py::test_rows_that_outgrow_what_was_expected_make_room_youngest_first",
        "a token in flight of a row that makes room is sampled again", "R006",
    ),
    Guard(
        "finished-not-settled", "engine/engine.py",
        "            if sequence.is_finished:\n                continue\n",
        "",
        "tests/engine/test_engine.py::test_cancelling_twice_is_cancelling_once",
        "a row that was cancelled gets no token more", "R080",
    ),
    Guard(
        "no-step-too-many", "engine/sequence.py",
        "len(self.output) + self.num_in_flight < self.max_tokens",
        "len(self.output) < self.max_tokens",
        "tests/engine/test_scheduler.py::test_a_sequence_whose_last_token_is_in_flight_is_not_asked_again",
        "nobody is decoded beyond max_tokens",
    ),
    Guard(
        "replayed-not-emitted", "engine/runner.py",
        "{one for one in order if not one.is_replaying}",
        "{*order}",
        "tests/engine/test_resume.py::test_an_answer_that_made_room_goes_on_and_tells_nothing_twice",
        "a token that is computed again is not emitted again", "R035",
    ),
    Guard(
        "fork-of-states", "engine/runner.py",
        "RowMemory(copy.deepcopy(_memory(leader).own))",
        "RowMemory(_memory(leader).own)",
        "tests/oracle/test_alone_in_a_crowd.py::test_forks_of_a_prompt_answer_as_if_each_had_computed_it[llama4]",
        "each answer to one prompt has its own copy of its states", "R058",
    ),
    Guard(
        "fork-takes-over", "engine/scheduler.py",
        "return [successors.get(id(one), one) for one in queue if id(one) in successors or not one.is_finished]",
        "return [one for one in queue if not one.is_finished]",
        "tests/engine/test_forks.py::test_when_the_first_fork_leaves_its_work_is_inherited",
        "further answers go on when the first one leaves", "R038 R058",
    ),
    Guard(
        "not-finite", "engine/sampler.py",
        "problems = mx.where(mx.isfinite(mx.max(raw, axis=-1)), 0, 2)",
        "problems = mx.where(mx.isfinite(raw[:, 0]), 0, 2)",
        "tests/engine/test_sampler.py::test_logits_that_are_not_numbers_are_reported_for_their_row_only",
        "a row whose logits are not finite fails, and only that row", "R024",
    ),
    # Cuts of a prompt.
    Guard(
        "gated-delta-by-token", "kernels/gated_delta.py",
        "    return _on_cpu() and cpu.is_bound(mx.float32)",
        "    return False",
        "tests/oracle/test_cut_is_whole.py::test_no_cut_changes_a_bit[qwen3_5]",
        "gated delta layers take a prompt token by token", "R018 R063",
    ),
    Guard(
        "mamba-by-token", "kernels/recurrent.py",
        "    if not cpu.is_bound(mx.float32):",
        "    if True:",
        "tests/oracle/test_cut_is_whole.py::test_no_cut_changes_a_bit[nemotron_h]",
        "Mamba layers take a prompt token by token", "R018 R063",
    ),
    Guard(
        "no-token-alone", "engine/scheduler.py",
        "            end = last if end == last - 1 else end\n",
        "",
        "tests/engine/test_scheduler.py::test_no_chunk_has_one_token_unless_the_prompt_has_no_more",
        "no chunk has one token", "R018 R063",
    ),
    Guard(
        "no-token-alone-after-hit", "memory/prefix_tree.py",
        "(child.length == last or child.length < last - 1)",
        "child.length <= last",
        "tests/memory/test_prefix_tree.py::TestCuts::test_the_last_token_is_left_to_be_computed",
        "after a hit no token is computed alone", "R018 R045",
    ),
    Guard(
        "two-token-prompt", "engine/prefix.py",
        "        if row.count == 1:",
        "        if False:",
        "tests/oracle/test_cached_is_cold.py::test_after_a_prompt_of_two_tokens",
        "a token that was computed alone is not shared", "R018 R045",
    ),
    Guard(
        "boundaries", "engine/scheduler.py",
        "places = [position for position in sequence.boundaries if position > end + 1][:1]",
        "places = []",
        "tests/server/test_prefix_cache.py::TestBoundaries",
        "a chunk ends at each boundary that the front found", "R061, report 2",
    ),
    Guard(
        "tail-checkpoint", "engine/scheduler.py",
        "                places.append(tail)",
        "                pass",
        "tests/engine/test_prefix.py::test_eight_short_prompts_that_differ_in_their_last_words_share_what_one_before_them_left",
        "a checkpoint is made near a prompt's end", "R044, report 1",
    ),
    Guard(
        "slices", "engine/scheduler.py",
        "self.config.gap_factor * self.step_seconds if steps and not is_short else None",
        "None",
        "tests/engine/test_scheduler.py::test_a_chunk_beside_steps_has_a_time_limit_and_alone_it_has_none",
        "a long prompt beside decoding rows is computed in slices", "R110, report 4",
    ),
    # Cached prefixes.
    Guard(
        "entered-after-chunk", "engine/engine.py",
        "            self.prefix.enter(row)\n",
        "",
        "tests/server/test_prefix_cache.py::"
        "TestEightAtOnce::test_short_prompts_that_differ_in_their_last_words_hit_what_one_before_them_left",
        "a prompt is shared when its chunk is computed, not when its answer ends", "R043 R044, report 1",
    ),
    Guard(
        "pinned-not-evicted", "memory/prefix_tree.py",
        "if not node.children and not node.pins), None)",
        "if not node.children), None)",
        "tests/memory/test_prefix_tree.py::test_what_a_sequence_goes_on_from_stays_with_its_checkpoint",
        "a prefix in use is not evicted", "R033",
    ),
    Guard(
        "checkpoint-while-pinned", "memory/prefix_tree.py",
        "not node.pins and not node.is_worth_a_checkpoint",
        "not node.is_worth_a_checkpoint",
        "tests/memory/test_prefix_tree.py::test_what_a_sequence_goes_on_from_stays_with_its_checkpoint",
        "a checkpoint stays while a sequence will go on from it", "R033 R055",
    ),
    Guard(
        "salt", "engine/prefix.py",
        "tree.root(sequence.request.salt)",
        'tree.root("")',
        "tests/engine/test_prefix.py::test_salts_share_nothing",
        "prompts under different salts share nothing", "R057",
    ),
    Guard(
        "salt-on-disk", "memory/prefix_tree.py",
        "hashlib.blake2b(salt.encode(), digest_size=16)",
        "hashlib.blake2b(digest_size=16)",
        "tests/engine/test_prefix.py::TestDisk::test_salts_share_nothing_there_either",
        "prompts under different salts share nothing on disk", "R057",
    ),
    Guard(
        "hit-needs-checkpoint", "memory/prefix_tree.py",
        "if child.checkpoint is not None and child.length > found.length:",
        "if child.length > found.length:",
        "tests/memory/test_prefix_tree.py::TestWhy::test_a_checkpoint_that_was_not_kept",
        "a prompt goes on only where the states of all layers are there", "R055 R056",
    ),
    Guard(
        "checkpoint-copied", "model/saved_state.py",
        "return copy.deepcopy(state)",
        "return state",
        "tests/oracle/test_cached_is_cold.py::test_one_after_the_other[qwen3_5]",
        "a row that goes on from a checkpoint leaves it as it was", "R013",
    ),
    Guard(
        "twin-needs-same-chunk", "engine/scheduler.py",
        "next(self.chunk_ends(one)) == end and one.prefill_ids[start:end] == other.prefill_ids[start:end]",
        "next(self.chunk_ends(one)) == end",
        "tests/engine/test_prefix.py::test_whoever_needs_another_chunk_inherits_nothing",
        "half a chunk is handed only to a prompt that needs the same one", "R046",
    ),
    Guard(
        "retained-once", "engine/prefix.py",
        "caches, num_bytes = self._kept.pop(node, (None, 0))",
        "caches, num_bytes = self._kept.get(node, (None, 0))",
        "tests/engine/test_prefix.py::test_of_two_that_go_on_from_one_place_one_has_the_caches_and_the_other_a_copy",
        "retained caches are given to one row", "R013",
    ),
    Guard(
        "retained-of-invalid", "engine/prefix.py",
        "for node in [node for node in self._kept if node.is_detached]:",
        "for node in []:",
        "tests/engine/test_prefix.py::test_nobody_goes_on_with_the_caches_of_what_was_thrown_out",
        "retained caches go with their node", "R057",
    ),
    Guard(
        "prompt-read", "engine/prefix.py",
        "        if sequence.must_read_prompt or cursor.is_private",
        "        if cursor.is_private",
        "tests/engine/test_prefix.py::TestWhatIsTold::test_that_all_of_it_had_to_be_read",
        "a prompt whose log-probabilities are asked for is computed", "R045",
    ),
    Guard(
        "cached-tokens", "engine/prefix.py",
        "sequence.timings.cached_tokens += found.length - cursor.node.length",
        "sequence.timings.cached_tokens += found.length",
        "tests/oracle/test_cached_is_cold.py::test_all_at_once[qwen3_5]",
        "cached_tokens is what was not computed", "R045",
    ),
    Guard(
        "usage-cached", "serving/active_request.py",
        "cached_tokens=timings.cached_tokens,",
        "cached_tokens=0,",
        "tests/server/test_prefix_cache.py::test_the_same_prompt_again_computes_one_token",
        "usage tells what was cached", "R045",
    ),
    Guard(
        "usage-of-forks", "api/openai/reply.py",
        "cached_tokens=sum(usage.cached_tokens for usage in usages[::n]),",
        "cached_tokens=sum(usage.cached_tokens for usage in usages),",
        "tests/server/test_prefix_cache.py::test_of_several_answers_to_a_prompt_the_cached_tokens_are_counted_once",
        "of several answers the prompt's cached tokens are counted once", "R045",
    ),
    Guard(
        "disk-digest", "memory/disk_files.py",
        '        raise Damaged("its bytes do not have the digest that was written with them")\n',
        "        pass\n",
        "tests/engine/test_prefix.py::TestDisk::test_damage_costs_the_time_to_compute_again",
        "a damaged file is computed again", "R016",
    ),
    Guard(
        "disk-rank", "model/saved_state.py",
        "if type(pattern) is KVCache and layer is not None and not _is_block(layer):",
        "if False:",
        "tests/model/test_saved_state.py::test_a_block_of_another_rank_is_damaged",
        "keys and values of another rank on disk are computed again", "R016",
    ),
    Guard(
        "disk-checkpoint", "engine/runner.py",
        '                raise Damaged(f"layer {layer} of its checkpoint: {reason}")\n',
        "                pass\n",
        "tests/engine/test_prefix.py::TestDisk::test_states_of_another_rank_are_computed_again",
        "a recurrent state of another shape on disk is computed again", "R016",
    ),
    Guard(
        "disk-identity", "memory/disk_files.py",
        '("identity", identity), ',
        "",
        "tests/memory/test_disk.py::test_a_file_of_another_model_is_foreign",
        "states of another model are not loaded", "R016",
    ),
    Guard(
        "void-loads", "memory/disk.py",
        "            if generation != self._generation:\n                return []\n",
        "",
        "tests/memory/test_disk.py::test_a_load_that_has_read_what_is_forgotten_meanwhile_gives_nothing",
        "what was invalidated does not come back from a load under way", "R057",
    ),
    # Constraints.
    Guard(
        "constraint-per-row", "engine/sequence.py",
        "self.constraint = constraint.fork()",
        "self.constraint = constraint",
        "tests/engine/test_constrained.py::test_forks_have_constraints_of_their_own",
        "each row has a constraint of its own", "R065, report 1",
    ),
    Guard(
        "matcher-per-request", "grammar/compiler.py",
        "        return found.fork()",
        "        return found",
        "tests/grammar/test_constraint.py::test_threads_that_compile_and_advance_have_exactly_the_masks_of_one_after_the_other",
        "each request has a matcher of its own", "R065, report 1",
    ),
    Guard(
        "settled-before-masked", "engine/order.py",
        "        if last is not None:\n"
        "            self.engine.settle(last)\n"
        "        if self.pending is not None:\n"
        "            self.engine.sample(self.pending)\n",
        "        if self.pending is not None:\n"
        "            self.engine.sample(self.pending)\n"
        "        if last is not None:\n"
        "            self.engine.settle(last)\n",
        "tests/oracle/test_alone_in_a_crowd.py::"
        "test_a_constrained_row_is_the_same_alone_and_among_others_in_the_order_of_a_gpu[llama]",
        "in the order of a GPU a matcher has the last token before the next mask is made", "R067, report 1",
    ),
    Guard(
        "settled-first-on-cpu", "engine/order.py",
        "            self.engine.settle(last)\n"
        "        self.engine.on_events()\n"
        "        if self.pending is not None:\n"
        "            self.engine.runner.start(self.pending)\n"
        "            self.engine.sample(self.pending)\n",
        "            pass\n"
        "        if self.pending is not None:\n"
        "            self.engine.runner.start(self.pending)\n"
        "            self.engine.sample(self.pending)\n"
        "        if last is not None:\n"
        "            self.engine.settle(last)\n"
        "        self.engine.on_events()\n",
        "tests/server/test_constrained_crowd.py::"
        "test_strict_answers_in_a_crowd_are_valid_and_carry_their_own_marker[tiny-hybrid-8]",
        "in the order of a CPU a matcher has the last token before the next mask is made", "R064 R067, report 1",
    ),
    Guard(
        "mask-rows", "engine/engine.py",
        "        allowed, errors = self.masks.fill(demands)",
        "        allowed, errors = self.masks.fill(sorted(demands, key=lambda one: one is None))",
        "tests/server/test_constrained_crowd.py::test_a_plain_request_amid_the_answer_switches_no_schema_off",
        "a mask is its own row's", "R074, report 3",
    ),
    Guard(
        "matcher-rows", "grammar/constraint.py",
        "pairs = [(matcher.inner, row) for row, matcher in matchers.items()]",
        "pairs = [(matcher.inner, row) for row, matcher in enumerate(matchers.values())]",
        "tests/grammar/test_constraint.py::test_rows_among_free_ones_have_exactly_the_masks_they_have_alone",
        "each grammar fills its own row of the mask", "R074, report 3",
    ),
    Guard(
        "demand-rows", "grammar/constraint.py",
        "for row, demand in enumerate(demands):",
        "for row, demand in enumerate(filter(None, demands)):",
        "tests/server/test_constrained_crowd.py::test_a_plain_request_amid_the_thinking_switches_no_budget_off",
        "a forced token is its own row's", "R071 R074, report 3",
    ),
    Guard(
        "budget-spent", "grammar/reasoning_budget.py",
        "state.spent < self.budget",
        "True",
        "tests/engine/test_constrained.py::test_a_budget_beside_plain_rows_holds_to_the_token",
        "a reasoning budget ends the reasoning", "R071, report 3",
    ),
    Guard(
        "budget-within-max-tokens", "engine/sequence.py",
        "        self.constraint.limit_to(self.max_tokens)\n",
        "",
        "tests/engine/test_constrained.py::test_thinking_without_a_budget_leaves_room_for_the_answer",
        "reasoning leaves room for the answer", "R071",
    ),
    Guard(
        "budget-names", "api/dialect.py",
        '(BUDGET, "thinking_budget", "reasoning_budget"',
        '(BUDGET, "reasoning_budget"',
        "tests/api/test_chat_dialect.py::test_a_thinking_budget_goes_by_many_names",
        "a reasoning budget acts by the name of the report", "R071, report 3",
    ),
    Guard(
        "unknown-constraint", "api/dialect.py",
        'if CONSTRAINING & {word.removesuffix("s") for word in words}:',
        "if False:",
        "tests/api/test_chat_dialect.py::test_an_unknown_constraint_is_refused_with_the_nearest_known_name",
        "a constraint that would not act is refused", "R086, report 3",
    ),
    Guard(
        "grammar-after-reasoning", "grammar/constraint.py",
        'if self.matcher is None or now.forced or now.phase == "reasoning":',
        "if self.matcher is None or now.forced:",
        "tests/grammar/test_constraint.py::test_what_is_thought_never_reaches_the_grammar",
        "what is thought never reaches the grammar", "R086",
    ),
    Guard(
        "no-end-in-reasoning", "grammar/constraint.py",
        "never = ends if self.matcher is not None else ()",
        "never = ()",
        "tests/grammar/test_constraint.py::test_what_is_thought_never_reaches_the_grammar",
        "no answer ends before its grammar has begun", "R086",
    ),
    Guard(
        "grammar-forgotten", "engine/host.py",
        "                self.compiler.forget(ended.request.constraint)\n",
        "                pass\n",
        "tests/engine/test_constrained.py::test_the_grammar_of_a_row_that_failed_is_compiled_anew",
        "an error in a shared lexer meets no later request", "R065",
    ),
    Guard(
        "exponents", "text/schema.py",
        'in node.get("type", ()) and (step := node.get("multipleOf", 1)) % 1:',
        'in node.get("type", ()) and (step := node.get("multipleOf", 1)):',
        "tests/text/test_schema.py::test_numbers_keep_their_exponents",
        "numbers under strict schemas may have exponents", "R064",
    ),
    Guard(
        "ascii-digits", "text/schema.py",
        '{r"\\d": "[0-9]", ',
        "{",
        "tests/text/test_schema.py::test_each_kind_keeps_its_words",
        "digits in a regex are ASCII's",
    ),
    # Sampling.
    Guard(
        "seed-and-position", "engine/sequence.py",
        ' + position.to_bytes(8, "little")',
        "",
        "tests/engine/test_sampler.py::test_draws_at_the_positions_of_one_answer_follow_it_too",
        "each position has a random number of its own", "R018",
    ),
    Guard(
        "seed-per-row", "engine/sampler.py",
        "[row.uniform(row.num_tokens) for row in group]",
        "[group[0].uniform(row.num_tokens) for row in group]",
        "tests/engine/test_sampler.py::test_no_mix_of_neighbours_changes_a_choice",
        "a row draws with its own seed", "R073",
    ),
    Guard(
        "penalties-per-row", "engine/sampler.py",
        "[((index, token), change) for index, row in",
        "[((0, token), change) for index, row in",
        "tests/engine/test_sampler.py::test_no_mix_of_neighbours_changes_a_choice",
        "penalties change the row that has them", "R073",
    ),
    Guard(
        "counts", "engine/sequence.py",
        "            self.token_counts[token] += 1\n",
        "            pass\n",
        "tests/engine/test_sampler.py::test_penalties_follow_their_formulas",
        "tokens are counted for penalties", "R073",
    ),
    Guard(
        "counts-after-restart", "engine/sequence.py",
        "            self.token_counts = Counter(self.output)\n",
        "            self.token_counts = Counter()\n",
        "tests/engine/test_resume.py::test_an_answer_that_was_begun_elsewhere_goes_on_and_tells_only_what_is_new",
        "a row that is computed again counts its tokens as before", "R073",
    ),
    Guard(
        "logprobs-of-the-model", "engine/sampler.py",
        "logprobs_of(raw[i : i + 1]",
        "logprobs_of(adjusted[i : i + 1]",
        "tests/engine/test_sampler.py::test_logprobs_are_the_models_own",
        "log-probabilities are the model's, before any penalty or mask",
    ),
    Guard(
        "stop-token", "engine/sequence.py",
        '            self.ending = Ending("stop", stop_token=token)\n            return\n',
        '            self.ending = Ending("stop", stop_token=token)\n',
        "tests/engine/test_engine.py::test_a_stop_token_ends_the_answer_and_is_not_part_of_it",
        "a stop token is no part of the answer",
    ),
    Guard(
        "tokenizer-end", "model/loader.py",
        "*([] if own is None else [own])",
        "",
        "tests/model/test_loader.py::test_the_tokenizer_s_own_end_counts_and_ids_that_no_token_has_do_not",
        "the tokenizer's end token ends an answer",
    ),
    # Failures.
    Guard(
        "failed-row-invalidated", "engine/engine.py",
        "        self.prefix.reset(sequence)\n        self.prefix.invalidate(sequence)\n",
        "        self.prefix.reset(sequence)\n",
        "tests/engine/test_isolation.py::test_exactly_the_guilty_row_fails[llama-0-decode]",
        "what a failed row computed leaves the cache", "R024",
    ),
    Guard(
        "nan-row-invalidated", "engine/engine.py",
        "                self.prefix.invalidate(sequence)\n",
        "",
        "tests/engine/test_isolation.py::test_exactly_the_guilty_row_fails[llama-0-logits]",
        "what a row computed whose logits are not finite leaves the cache", "R024",
    ),
    Guard(
        "first-own-node", "engine/sequence.py",
        "PrefixCursor(first_own_node=self.prefix.first_own_node)",
        "PrefixCursor()",
        "tests/engine/test_isolation.py::test_exactly_the_guilty_row_fails[llama-0-decode]",
        "what a failed row computed leaves the cache, also when it was preempted before it was found", "R024",
    ),
    Guard(
        "invalidated-on-disk", "engine/prefix.py",
        "            self.disk.forget([key for one in node.subtree() for key in (one.key, *one.former_keys)])\n",
        "            pass\n",
        "tests/engine/test_prefix.py::TestDisk::test_what_a_failed_row_computed_leaves_the_disk_too",
        "what a failed row computed leaves the disk", "R024",
    ),
    Guard(
        "failed-alone-twice", "engine/bisect.py",
        "        if len(rows) == 1 and self.is_suspect(rows[0]):\n            del self._num_emitted[rows[0].id]\n",
        "        if len(rows) == 1:\n            self._num_emitted.pop(rows[0].id, None)\n",
        "tests/engine/test_bisect.py::test_a_fault_that_passes_before_its_row_was_alone_twice_ends_nobody",
        "a row that fails alone once is tried again", "R019",
    ),
    Guard(
        "blamed-for-all", "engine/bisect.py",
        "if len(rows) == 1 and self.is_suspect(rows[0]):",
        "if self.is_suspect(rows[0]):",
        "tests/engine/test_bisect.py::test_exactly_those_that_break_a_step_are_ended",
        "only the row that fails alone is ended", "R024",
    ),
    Guard(
        "suspects-alone", "engine/bisect.py",
        "return not self.groups or any(one is sequence for one in self.groups[0])",
        "return True",
        "tests/engine/test_bisect.py::test_exactly_those_that_break_a_step_are_ended",
        "nobody steps beside suspects", "R024",
    ),
    Guard(
        "suspects-first", "engine/scheduler.py",
        "[one for one in candidates if self.bisection.is_suspect(one)] or candidates",
        "candidates",
        "tests/engine/test_isolation.py::test_those_on_trial_are_let_in_before_more_urgent_ones_that_wait_for_them",
        "suspects, for whom all others wait, are admitted first", "R019 R024",
    ),
    Guard(
        "failed-turns", "engine/engine.py",
        "        if self.num_failed_turns >= MAX_FAILED_TURNS:",
        "        if False:",
        "tests/engine/test_isolation.py::test_an_engine_that_only_fails_says_so",
        "an engine that only fails ends, so that another one goes on", "R022",
    ),
    Guard(
        "failed-turns-reset", "engine/engine.py",
        "        logprobs = step.sampled.logprobs\n        self.num_failed_turns = 0\n",
        "        logprobs = step.sampled.logprobs\n",
        "tests/engine/test_isolation.py::test_a_step_that_succeeds_resets_the_count_of_failed_turns",
        "a step that succeeds resets the count of failed turns", "R022",
    ),
    Guard(
        "device-error-read", "engine/sampler.py",
        "        mx.eval(self.arrays())",
        "        pass",
        "tests/engine/test_sampler.py::test_reading_what_the_device_failed_to_compute_raises",
        "a step that failed on the device is not read", "R019",
    ),
    Guard(
        "device-error-drained", "engine/engine.py",
        "        self.order.pending = None\n        self.runner.drain()\n",
        "        self.order.pending = None\n",
        "tests/engine/test_failing_layers.py::test_the_error_of_a_step_that_is_given_up_meets_nobody",
        "an error that the device reports late meets no other row", "R019",
    ),
    Guard(
        "cancel-once", "engine/engine.py",
        '        if not sequence.is_finished:\n            self._finish(sequence, "cancelled")',
        '        self._finish(sequence, "cancelled")',
        "tests/engine/test_engine.py::test_cancelling_twice_is_cancelling_once",
        "a request that is over is not ended again", "R080",
    ),
    Guard(
        "blame-alone", "serving/in_flight.py",
        "if is_alone and one.deaths_alone >= DEATHS_ALONE)",
        "if True)",
        "tests/serving/test_in_flight.py::test_who_is_beside_others_is_not_blamed_however_often_engines_are_killed",
        "a request is blamed for dead engines only when it was alone in two", "R034",
    ),
    Guard(
        "blame-three", "serving/in_flight.py",
        "if one.deaths > SUSPECT_DEATHS), None)",
        "), None)",
        "tests/serving/test_in_flight.py::test_one_that_proves_itself_after_a_death_alone_starts_anew",
        "a request is blamed for dead engines only when there were three", "R034",
    ),
    Guard(
        "proof", "serving/in_flight.py",
        "(1, 0) if one.has_proved else ",
        "",
        "tests/serving/test_in_flight.py::test_innocents_that_proved_themselves_beside_the_culprit_are_no_suspects",
        "a request that got on is no suspect", "R034",
    ),
    Guard(
        "resumed-with-emitted", "serving/in_flight.py",
        "        emitted=emitted if any(emitted) else (),",
        "        emitted=(),",
        "tests/serving/test_client.py::test_an_answer_goes_on_in_the_next_engine_and_nothing_is_told_twice",
        "a resumed answer goes on after what was emitted", "R035",
    ),
    Guard(
        "resumed-in-engine", "engine/engine.py",
        "request.emitted[index] if request.emitted else ()",
        "()",
        "tests/engine/test_resume.py::test_an_answer_that_was_begun_elsewhere_goes_on_and_tells_only_what_is_new",
        "an engine goes on after what another one emitted", "R035",
    ),
    Guard(
        "replayed-by-decoding", "engine/engine.py",
        "self.max_replayed_tokens = 0 if adapter.decodes_like_prefill else sys.maxsize",
        "self.max_replayed_tokens = 0",
        "tests/engine/test_resume.py::test_an_answer_that_was_begun_elsewhere_goes_on_and_tells_only_what_is_new",
        "a resumed answer has the bits of one that was not interrupted", "R018 R035",
    ),
    Guard(
        "resumed-seed", "serving/service.py",
        'return int.from_bytes(os.urandom(8), "little") >> 1',
        "return None",
        "tests/serving/test_service.py::test_choices_without_a_seed_get_one_each_so_that_another_engine_draws_the_same",
        "a resumed answer draws the numbers it would have drawn", "R035",
    ),
    Guard(
        "watchdog-turn", "serving/engine_process.py",
        "if self._beat.turn_seconds >= self.hang_seconds:",
        "if False:",
        "tests/serving/test_watchdog.py::test_a_turn_without_end_ends_the_engine_though_its_heart_beats",
        "an engine that hangs in a turn is replaced", "R037",
    ),
    Guard(
        "watchdog-silence", "serving/engine_process.py",
        "        if self._silence_seconds >= patience:",
        "        if False:",
        "tests/serving/test_watchdog.py::test_ten_seconds_of_silence_end_an_engine_that_was_ready",
        "an engine that is silent is replaced", "R037",
    ),
    # Admission, and the front.
    Guard(
        "memory-admission", "engine/scheduler.py",
        "            if not self.budget.fits(sequence, self.running):\n",
        "            if False:\n",
        "tests/engine/test_budget.py::test_sixty_four_long_requests_all_finish_with_room_for_a_few",
        "a row is admitted when it fits into memory", "R028 R032",
    ),
    Guard(
        "memory-limit", "ipc/limits.py",
        "        if total > self.memory_tokens:",
        "        if False:",
        "tests/engine/test_budget.py::test_what_can_never_fit_is_refused_with_the_numbers",
        "what never fits is refused", "R030",
    ),
    Guard(
        "fair-order", "engine/scheduler.py",
        "self.served.get(one.client, 0.0), not one.is_preempted",
        "not one.is_preempted",
        "tests/engine/test_budget.py::test_clients_are_served_alike_and_the_urgent_before_them",
        "the client that was served least is next", "R032",
    ),
    Guard(
        "fair-preemption", "engine/scheduler.py",
        "        return next(one for one in reversed(running) if one.client == client)",
        "        return None",
        "tests/engine/test_budget.py::test_a_client_without_a_row_does_not_wait_for_one_that_has_them_all",
        "a client without a row does not wait for one that has them all", "R032",
    ),
    Guard(
        "queue-limit", "serving/queue.py",
        "        if taken + count > num_places:",
        "        if False:",
        "tests/server/test_front.py::test_a_full_queue_is_told_and_when_to_come_again",
        "beyond the queue's limit a request is sent away", "R032",
    ),
    Guard(
        "body-cap", "api/http.py",
        "                if len(body) > max_bytes:\n",
        "                if False:\n",
        "tests/api/test_body.py::test_a_body_that_grows_too_large_is_refused_at_once",
        "a body has a largest size", "R039",
    ),
    Guard(
        "foreign-host", "api/http.py",
        'if _kind_of(host) == "name" and host not in self.allowed_hosts:',
        "if False:",
        "tests/api/test_guards.py::test_a_name_that_may_resolve_to_us_by_another_hand_is_refused",
        "a name that somebody else made to resolve to us is refused",
    ),
    Guard(
        "half-characters", "text/tokenizer.py",
        "        self.unfinished = data[used:]\n",
        '        self.unfinished = b""\n',
        "tests/text/test_tokenizer.py::test_characters_spelled_in_byte_tokens_are_whole",
        "a character is told when all its bytes are there", "R099",
    ),
    Guard(
        "stop-strings-held-back", "text/stop_strings.py",
        "len(text) - max(overlap(text, stop) for stop in self._stops)",
        "len(text)",
        "tests/text/test_stop_strings.py::test_a_stop_across_many_pieces_is_held_back_until_it_is_sure",
        "the beginning of a stop string is held back",
    ),
]
