"""The table of fields that other servers and their clients name and that do not act here, each with its reason.

Fields that act are those of the request structs. `docs/parameters.md` is generated from both.
"""

from typing import Any

from weft.api.fields import Fates, harmless, refused, reported

LABEL = "a label"
BOUND_BY_SERVER = "the server's settings decide it"
HOSTED = "belongs to a tool that weft does not have"
NOT_CUT = "a prompt is never cut; one that is too long is a 400"
NO_ADAPTERS = "adapters are not served; serve the merged model"
NO_DRAFT_MODEL = "weft drafts without a second model: from grammar, prompt and answer, and the model's own MTP head"
NO_CODE = "code of a client's is never run"
NO_SAMPLER = "this sampler is not available"
WHOLE_CONTEXT = "penalties look at the whole prompt and answer"
INSIDE = "the inside of a model is not shown"
NO_SEARCH = "the server does not search; give the model a tool of yours"
ALWAYS_CACHED = "prompts are cached anyway"
TEXT_ONLY = "answers are text"
MODELS_STAY = "models stay loaded until an admin unloads them"
PLACES = "where a request is computed is the server's affair"
REPORTED_ONCE = "timings are sent once, at the end"


def _each(names: str, fate: Any) -> Fates:
    return dict.fromkeys(names.split(), fate)


# On all of OpenAI's wires: fields of OpenAI, vLLM, SGLang, llama.cpp, LM Studio, mlx-lm and omlx.
OPENAI: Fates = {
    **_each("tools", refused("the Completions API has no tools; use Chat Completions", [])),
    **_each("tool_choice", refused("the Completions API has no tools; use Chat Completions", "none", "auto")),
    **_each("functions", refused("it is the older form of tools; send that", [])),
    **_each("function_call", refused("it is the older form of tool_choice; send that", "none", "auto")),
    **_each("prediction", refused("OpenAI has it in Chat Completions only")),
    **_each("modalities", refused(TEXT_ONLY, ["text"])),
    **_each("audio", refused(TEXT_ONLY)),
    **_each("moderation", refused("there is no moderation")),
    **_each("web_search_options", refused(NO_SEARCH)),
    **_each("suffix", refused("there is no fill-in-the-middle yet", "")),
    **_each("best_of", refused("every generated answer is returned; use n", 1)),
    **_each("n_cmpl", refused("use n", 1)),
    # What else may be sampled.
    **_each("xtc_probability dry_multiplier mirostat dynatemp_range top_a smoothing_factor", refused(NO_SAMPLER, 0)),
    **_each("typical_p tfs_z", refused(NO_SAMPLER, 1)),
    **_each("top_n_sigma epsilon_cutoff eta_cutoff", refused(NO_SAMPLER, 0, -1)),
    **_each("samplers sampler_seq sampler_order", refused("the order of samplers is fixed")),
    **_each("banned_tokens", refused("send logit_bias, or bad_words for texts", [])),
    **_each("logits_processors", refused(NO_CODE, [])),
    **_each("custom_logit_processor", refused(NO_CODE)),
    **_each("custom_params vllm_xargs", refused("they are for code that a server is extended with", {})),
    **_each("use_beam_search", refused("there is no beam search", False)),
    **_each("length_penalty", refused("it belongs to beam search, and there is none", 1)),
    **_each("early_stopping", refused("it belongs to beam search, and there is none", False)),
    **_each("min_keep", refused("a sampler leaves at least one token", 0)),
    **_each("n_indent", refused("answers are not indented", 0)),
    **_each("repetition_detection", refused("answers that repeat themselves are not ended; use a penalty")),
    **_each("stop_regex", refused("stop takes texts")),
    **_each("t_max_predict_ms", refused("the header x-request-timeout limits a request's time", 0, -1)),
    # What the answer must look like.
    **_each("ebnf", refused("send guided_grammar, in Lark or GBNF")),
    **_each("guided_whitespace_pattern", refused("the white space of a constrained answer can not be chosen")),
    **_each("parse_tool_calls", refused("calls are always read; leave tools out to have text", True)),
    **_each("generation_prompt", refused("the chat template writes it; send continue_final_message with a last message")),
    **_each("thinking_forced_open reasoning_in_content", refused("reasoning is found by the chat template", False)),
    **_each("reasoning_control", refused("reasoning is ended by its budget: thinking_token_budget", False)),
    **_each("reasoning_budget_message", refused("the template's own closing marker ends reasoning", "")),
    # Which weights, and whose code.
    **_each("lora lora_request adapters lora_path lora_adapters", refused(NO_ADAPTERS, [])),
    **_each("draft_model", refused(NO_DRAFT_MODEL)),
    **_each("chat_template", refused("the model's own template is used; chat_template_kwargs are its variables")),
    # What is in the prompt.
    **_each("documents", refused("send them in chat_template_kwargs if the template reads them, or in a message", [])),
    **_each("truncate_prompt_tokens", refused(NOT_CUT, -1)),
    **_each("add_special_tokens", refused("the chat template writes them; in Completions they are always added", False)),
    **_each("prompt_embeds input_ids multi_modal_data", refused("a prompt is text, images or token ids")),
    **_each("mm_processor_kwargs media_io_kwargs images_config video_config", refused("images are read as the model says", {})),
    **_each("max_dynamic_patch min_dynamic_patch", refused("images are cut as the model's files say")),
    **_each("use_audio_in_video", refused("there is no video", False)),
    **_each("session_params", refused("a conversation is sent whole; what was computed of it is found")),
    **_each("extra_key", refused("send cache_salt")),
    # What is told beside the answer.
    **_each("logprobs_mode", refused("log-probabilities are always those before penalties, temperature and constraints")),
    **_each("n_probs", refused("send logprobs and top_logprobs", 0)),
    **_each("post_sampling_probs", refused("log-probabilities are those before penalties, temperature and constraints", False)),
    **_each("logprob_token_ids", refused("send top_logprobs")),
    **_each("prompt_logprobs", refused("Chat Completions and Completions have it", 0)),
    **_each("return_token_ids", refused("Chat Completions and Completions have it", False)),
    **_each("return_tokens return_tokens_as_token_ids", refused("send return_token_ids", False)),
    **_each("return_prompt_token_ids", refused("send return_token_ids", False)),
    **_each("return_token_offsets return_prompt_text", refused("/tokenize gives them", False)),
    **_each("return_hidden_states return_routed_experts return_sampling_mask", refused(INSIDE, False)),
    **_each("return_assistant_tokens_mask return_meta_info", refused(INSIDE, False)),
    **_each("routed_experts_prompt_start routed_experts_start_len", harmless("belongs to return_routed_experts")),
    **_each("return_progress", reported("the progress of a prompt is told in a stream's comments only")),
    **_each("timings_per_token", reported(REPORTED_ONCE)),
    **_each("include_stop_str_in_output no_stop_trim", refused("a stop string is never part of the answer", False)),
    **_each("spaces_between_special_tokens", refused("tokens are written without blanks between them", True)),
    **_each("reasoning_format", refused("reasoning is always in reasoning_content", "auto", "deepseek")),
    **_each("include_reasoning separate_reasoning stream_reasoning", refused("reasoning has a field of its own", True)),
    **_each("response_fields", refused("a reply has all its fields", [])),
    **_each("background", refused("responses are generated while the client waits", False)),
    # Hints and labels.
    **_each("user safety_identifier metadata request_id rid custom_labels access_programs client_metadata", harmless(LABEL)),
    **_each("store", harmless("only responses are stored")),
    **_each("verbosity", harmless("a hint that no model here takes")),
    **_each("parallel_tool_calls", harmless("without tools there are no calls")),
    **_each("prompt_cache_options cache_prompt n_cache_reuse", harmless(ALWAYS_CACHED)),
    **_each("prompt_cache_retention", harmless(BOUND_BY_SERVER)),
    **_each("ttl keep_alive", harmless(MODELS_STAY)),
    **_each("guided_decoding_backend", harmless("there is only one")),
    **_each("n_keep n_discard truncation_side", harmless("nothing is ever cut off a prompt")),
    **_each("id_slot slot_id routed_dp_rank data_parallel_rank disagg_prefill_dp_rank", harmless(PLACES)),
    **_each("bootstrap_host bootstrap_port bootstrap_room kv_transfer_params ec_transfer_params", harmless(PLACES)),
    **_each("xtc_threshold", harmless("belongs to xtc_probability")),
    **_each("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", harmless("belongs to dry_multiplier")),
    **_each("mirostat_tau mirostat_eta", harmless("belongs to mirostat")),
    **_each("dynatemp_exponent", harmless("belongs to dynatemp_range")),
    **_each("sse_ping_interval stream_interval", harmless(BOUND_BY_SERVER)),
    **_each("return_cached_tokens_details return_spec_tokens_details", harmless("usage and timings have them")),
    **_each("task enable_response_messages verbose", harmless("a hint of another server's own")),
    # One level down.
    "stream_options.include_obfuscation": harmless("frames are not padded"),
    "stream_options.continuous_usage_stats": refused("usage is sent once, at the end of a stream", False),
    "response_format.name": harmless(LABEL),
    "response_format.description": harmless(LABEL),
}

CHAT: Fates = {
    "echo": refused("Completions has it", False),
    "messages[].function_call": refused("it is the older form of tool_calls; send that"),
    "messages[].images": refused("send them as parts of content, of type image_url"),
    "messages[].audio": refused("audio is not read"),
    "messages[].thinking": refused("send reasoning_content"),
    "messages[].tool_name": refused("send tool_call_id"),
    "messages[].prefix": refused("send continue_final_message", False),
    "messages[].partial": refused("send continue_final_message", False),
    "messages[].annotations": harmless("what a search had found"),
    "messages[].reasoning_details": harmless("its text is in reasoning"),
    "messages[].cache_control": harmless(ALWAYS_CACHED),
    "messages[].weight": harmless("belongs to training"),
    "messages[].id": harmless(LABEL),
    "messages[].tool_calls[].index": harmless("calls are in the order of their list"),
    "messages[].content[].cache_control": harmless(ALWAYS_CACHED),
    "messages[].content[].annotations": harmless("what a search had found"),
    "messages[].content[].logprobs": harmless("of an earlier answer"),
    "tools[].cache_control": harmless(ALWAYS_CACHED),
    "tools[].defer_loading": harmless("all tools are shown to the model from the beginning"),
    "tools[].function.defer_loading": harmless("all tools are shown to the model from the beginning"),
}

COMPLETIONS: Fates = {"add_special_tokens": refused("special tokens are always added; send ids to have none", True)}

RESPONSES: Fates = {
    "conversation": refused("conversations are not stored; previous_response_id refers to a response"),
    "context_management": refused("nothing is removed from a prompt", []),
    "prompt": refused("it would refer to a prompt stored at OpenAI"),
    "max_tokens": refused("send max_output_tokens"),
    "max_completion_tokens": refused("send max_output_tokens"),
    "reasoning_effort": refused("send reasoning.effort"),
    **_each("enable_thinking think reasoning.enabled", refused("send reasoning.effort", True)),
    "thinking.type": refused("send reasoning.effort", "enabled", "adaptive", "auto"),
    "reasoning.exclude": refused("reasoning is always shown", False),
    "previous_input_messages": refused("send input"),
    "image": harmless("a setting of a tool that weft does not have"),
    "input[].id": harmless("items are told apart by their places"),
    "input[].status": harmless("of an earlier answer"),
    "input[].phase": harmless("of an earlier answer"),
    "input[].content[].annotations": harmless("what a search had found"),
    "input[].content[].logprobs": harmless("of an earlier answer"),
}

MESSAGES: Fates = {
    **{path: fate for path, fate in OPENAI.items() if path.isidentifier()},
    **_each("n best_of n_cmpl", refused("a message has one answer", 1)),
    **_each("presence_penalty frequency_penalty", refused("Messages has no penalties; use Chat Completions", 0)),
    **_each("repetition_penalty repeat_penalty", refused("Messages has no penalties; use Chat Completions", 1)),
    **_each("repeat_last_n repetition_context_size presence_context_size frequency_context_size", refused(WHOLE_CONTEXT, -1)),
    **_each("logit_bias", refused("Messages has no biases; use Chat Completions", {})),
    **_each("allowed_token_ids bad_words banned_tokens", refused("use Chat Completions", [])),
    **_each("logprobs", refused("Messages has no log-probabilities; use Chat Completions", False)),
    **_each("top_logprobs prompt_logprobs n_probs", refused("Messages has no log-probabilities; use Chat Completions", 0)),
    **_each("echo ignore_eos continue_final_message", refused("use Chat Completions or Completions", False)),
    **_each("skip_special_tokens add_generation_prompt", refused("use Chat Completions", True)),
    **_each("structured_outputs", refused("send output_config.format")),
    **_each("reasoning_effort", refused("send output_config.effort")),
    **_each("enable_thinking think", refused("send thinking")),
    "reasoning.effort": refused("send output_config.effort"),
    "reasoning.enabled": refused("send thinking", True),
    "reasoning.exclude": refused("send thinking.display", False),
    **_each("parallel_tool_calls", refused("send tool_choice.disable_parallel_tool_use", True)),
    **_each("functions function_call", refused("send tools and tool_choice")),
    **_each("instructions", refused("send system")),
    **_each("previous_response_id", refused("send the whole conversation")),
    **_each("cache_salt", refused("use Chat Completions")),
    "mcp_servers": refused("the server calls no other servers; give the model a tool of yours", []),
    "thread": refused("threads are not kept here; send the whole conversation without it"),
    "container": refused("there is no container to run code in"),
    "compaction": refused("a conversation is not summarised here; send the shortened one"),
    "context_management": reported("nothing is removed from a prompt"),  # Claude Code sends it with every request
    "betas": harmless("what is done here needs no beta"),
    "fallbacks": harmless("the model that is named answers"),
    "fallback_credit_token": harmless("nothing is billed"),
    "billing_policy": harmless("nothing is billed"),
    "diagnostics": harmless("`weft cache why` and the log tell why a prompt was not cached"),
    "cache_control": harmless(ALWAYS_CACHED),
    "service_tier": harmless("there is only one"),
    "speed": harmless("there is only one"),
    "inference_geo": harmless("requests are computed on the machine of the server"),
    "user_profile_id": harmless(LABEL),
    "workspace_id": harmless(LABEL),
    "keep_alive": harmless(MODELS_STAY),
    "ttl": harmless(MODELS_STAY),
    "tools[].defer_loading": harmless("all tools are shown to the model from the beginning"),
    "tools[].eager_input_streaming": harmless("arguments are streamed as they are written"),
    "tools[].allowed_callers": refused("only the model calls a tool", ["direct"]),
    "messages[].output_config": refused("send it at the top of the request"),
    "messages[].clear_at": harmless("nothing is removed from a prompt"),
    "messages[].id": harmless(LABEL),
    "messages[].content[].id": harmless(LABEL),
    "messages[].content[].toolset_name": harmless(LABEL),
    "messages[].content[].caller": harmless("only the model calls a tool"),
    **_each("tools[].max_uses tools[].allowed_domains tools[].blocked_domains tools[].user_location", harmless(HOSTED)),
    **_each("tools[].display_width_px tools[].display_height_px tools[].display_number", harmless(HOSTED)),
    **_each("tools[].max_characters tools[].max_content_tokens tools[].citations tools[].use_cache", harmless(HOSTED)),
    "output_config.task_budget": harmless("a hint that no model here takes"),
}

OLLAMA: Fates = {
    **_each("temperature top_k top_p seed presence_penalty frequency_penalty repeat_penalty", refused("send it in options")),
    **_each("num_predict num_ctx mirostat typical_p", refused("send it in options")),
    **_each("tool_choice response_format guided_json structured_outputs", refused("use the OpenAI API")),
    **_each("reasoning_effort reasoning.effort", refused("send think")),
    **_each("enable_thinking reasoning.enabled", refused("send think", True)),
    **_each("chat_template_kwargs.enable_thinking chat_template_kwargs.thinking", refused("send think", True)),
    "thinking.type": refused("send think", "enabled", "adaptive", "auto"),
    "reasoning.exclude": refused("reasoning is always shown", False),
    "options.think": refused("send it beside options"),
    "template": refused("the model's own template is used", ""),
    "suffix": refused("there is no fill-in-the-middle yet", ""),
    "context": refused("send the conversation as messages", []),
    "logprobs": refused("use the OpenAI API for log-probabilities", False),
    "top_logprobs": refused("use the OpenAI API for log-probabilities", 0),
    "_debug_render_only": refused("/tokenize shows what becomes of a text", False),
    **_each("width height steps", refused("images are not made here", 0)),
    "keep_alive": harmless(MODELS_STAY),
    **_each("truncate shift", harmless("nothing is ever cut off a prompt")),
    "options.mirostat": refused(NO_SAMPLER, 0),
    **_each("options.typical_p options.tfs_z", refused(NO_SAMPLER, 1)),
    "options.penalize_newline": refused("penalties look at all tokens", True),
    **_each("options.mirostat_tau options.mirostat_eta", harmless("belongs to mirostat")),
    "options.num_ctx": harmless("the context is the model's, and a prompt that is too long is a 400"),
    **_each("options.num_keep", harmless("nothing is ever cut off a prompt")),
    **_each("options.num_batch options.num_gpu options.main_gpu options.num_thread options.numa", harmless(BOUND_BY_SERVER)),
    **_each("options.low_vram options.f16_kv options.use_mmap options.use_mlock options.vocab_only", harmless(BOUND_BY_SERVER)),
    **_each("options.logits_all options.embedding_only options.draft_num_predict", harmless(BOUND_BY_SERVER)),
}
