"""Names of vLLM 0.32 as data: where each is found here, or what to use in its place. It imports nothing.

`jpaged.vllm_compat` applies the tables of settings and flags, `jpaged.vllm_refusals` those of modules, classes and
calls. docs/from_vllm.md shows them. tests/vllm_names.json lists vLLM's names, and tests/test_vllm_names.py looks each
of them up. The file is long because it is a table.

A table of reasons has a row for each: names, a colon, and what to use; what is indented goes on with the row before.
"""

Reasons = dict[str, str]


def _table(rows: str) -> Reasons:
    """Return the reason of each name; @name stands for one of `_SHARED`."""
    table: Reasons = {}
    for row in rows.replace("\n    ", " ").splitlines():
        names, _, reason = row.partition(": ")
        table |= dict.fromkeys(names.split(), _SHARED[reason[1:]] if reason.startswith("@") else reason)
    return table


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SHARED: Reasons = {}
_SHARED |= _table(
    """
cluster: give tensor_parallel_size and data_parallel_size; over hosts call jax.distributed.initialize() first
compiler: XLA compiles every shape once: call warmup(), or give enforce_eager=True to compile nothing ahead
images: images are prepared as the checkpoint and mm_processor_kwargs say, and come in multi_modal_data or as image_url
    parts of messages
embeds: prompts are text or token ids, not embeddings
lora: adapters have the settings enable_lora, max_loras, max_cpu_loras, max_lora_rank and lora_modules, and the model's
    dtype
logits: logit_bias, allowed_token_ids, bad_words and structured_outputs of SamplingParams change what can be drawn
grammars: structured outputs run on llguidance: give SamplingParams(structured_outputs=...)
profiler: call jax.profiler.start_trace(folder) and jax.profiler.stop_trace()
watermark: tokens are not watermarked
extensions: there are no extensions that would read it
transfer: KV is not moved between engines; kv_offloading_size keeps it in host memory, disk_folder with disk_space on a
    local disk
routing: the experts that tokens were routed to are not returned
server: it is a setting of a server, not of the engine: see `jpaged serve --help`
waiting: AsyncLLM(max_waiting_requests=...) and `jpaged serve --max-waiting-requests` bound the requests that wait
changed_weights: LLM.update_params() and AsyncLLM.update_params() take new weights: arrays, NNX's forms or a state dict
workers: one process drives all its devices, so there are no workers to call
versions: weights have no version numbers: keep your own next to update_params()
mm_cache: images' features are cached with their prefixes: reset_prefix_cache() forgets both
logs: the log 'jpaged' has the throughput each few seconds; stats() and get_metrics() report at any time
pooled: use embed(), classify() or score()
from_tensor: LLM.embed(), classify() and score() make such outputs; construct it with its fields
knows: the caller has the adapter that it gave with the request
family: a package adds a model family with an entry point in the group 'jpaged.models': see docs/adding_a_model.md
settings: give the settings themselves to LLM(...): a setting that jpaged lacks says what to use
kernels: kernels are chosen by the devices
encoder: models with an encoder and a decoder are not supported
traces: `jpaged serve --otlp-traces-endpoint` sends traces
"""
)
"""Reasons of several rows, which name them as @name."""

# ---------------------------------------------------------------- settings

ALWAYS: dict[str, tuple[bool, str]] = {
    "enable_chunked_prefill": (True, "long prompts always run in chunks: a step holds at most max_num_batched_tokens"),
    "trust_remote_code": (False, "no code of a model's repository is run; a package adds a model family, see README"),
}
"""Settings that have one value here, which alone can be asked for, with the reason."""

DRAFTS = "speculative_config"
"""vLLM's name of the setting `speculative`, whose value has another form there."""

DRAFT_KEYS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Settings that stand for keys of `DRAFTS`."""

INSTEAD = _table(
    """
allowed_local_media_path: give images=jpaged.ImageSources(folders=[...])
allowed_media_domains: give images=jpaged.ImageSources(hosts=[...])
async_scheduling: the engine always dispatches a step before it reads the results of the one before
all2all_backend attention_backend attention_config disable_cascade_attn enable_flashinfer_autotune gdn_prefill_backend
    ir_op_priority kda_decode_backend kda_prefill_backend kernel_config linear_backend mamba_backend mamba_config
    mamba_ssu_algorithm mm_encoder_attn_backend mm_encoder_attn_dtype moe_backend replayssm_buffer_len
    sparse_indexer_topk_backend use_replayssm: @kernels
vllm_config: @settings
calculate_kv_scales: kv_cache_dtype='int8' stores scales with the KV; 'fp8' needs none
kv_cache_dtype_skip_layers: all layers hold KV in the form that kv_cache_dtype names
compilation_config cudagraph_capture_sizes cudagraph_metrics jit_monitor_mode jit_monitor_verbose
    max_cudagraph_capture_size max_seq_len_to_capture optimization_level performance_mode: @compiler
convert override_pooler_config pooler_config runner task: a model's folder says whether it generates, and LLM.embed(),
    classify() and score() say how by PoolingParams
cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params
    offload_prefetch_step: weights stay on the devices: quantization or tensor_parallel_size makes them fit
device device_ids: JAX_PLATFORMS=cpu, cuda or tpu in the environment chooses the devices
disable_custom_all_reduce enable_nccl_comm_suspend: XLA chooses the collectives
disable_log_requests enable_log_requests: requests are not logged; `jpaged serve --log-prompts` logs prompts and outputs
disable_sliding_window: windows are part of the model: their layers keep no more than the window
disable_hybrid_kv_cache_manager: layer groups share one pool, each with its own policy
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
    decode_context_parallel_size disable_nccl_for_dp_synchronization distributed_executor_backend
    distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo
    enable_elastic_ep enable_fault_tolerance enable_hc_sp fault_tolerance_config master_addr master_port nnodes
    node_rank numa_bind numa_bind_cpus numa_bind_nodes pipeline_parallel_size prefill_context_parallel_size
    prefill_schedule_interval ray_workers_use_nsight ubatch_size worker_cls worker_extension_cls: @cluster
enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy: enable_expert_parallel spreads whole experts
    over the devices; they are not moved afterwards
enable_prompt_embeds: @embeds
enable_mm_embeds: it is a flag of `jpaged serve`; LLM and AsyncLLM always take features of images
enable_cumem_allocator enable_shm_tensor_arena enable_sleep_mode sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names: LLM.sleep(), wake_up(), release_memory() and restore_memory() need no setting
default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora fully_sharded_loras
    long_lora_scaling_factors lora_dtype lora_extra_vocab_size lora_target_modules max_lora_cls_labels
    specialize_active_lora: @lora
guided_decoding_backend structured_outputs_config: @grammars
config_format hf_config_path hf_overrides rope_scaling rope_theta: the model's config.json is taken as it is: change a
    copy of the model's folder; classifier_from_token=('no', 'yes') is a setting, for Qwen3-Reranker
hf_token: HF_TOKEN in the environment, or `hf auth login`, tells the hub who you are
code_revision: no code of a model's repository is run
kv_events_config: kv_cache_events=N keeps the last N changes of cached blocks for readers
ec_manager_config ec_transfer_config kv_transfer_config: @transfer
kv_offloading_backend: kv_offloading_size keeps cached KV in host memory, disk_folder with disk_space on a local disk
ignore_patterns load_format max_parallel_loading_workers model_loader_extra_config model_weights pt_load_map_location
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load: the
    format is known from the files: safetensors, GGUF, or a checkpoint saved by `jpaged convert`
allow_deprecated_quantization quantization_config: quantization= names the form in which matrices are held
logits_processors: @logits
logprobs_mode: log-probabilities are the model's own, before temperature and edits ('raw_logprobs')
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint mamba_block_size mamba_cache_dtype
    mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype swa_bounded_replay: recurrent layers keep a state
    of its own dtype, a block each state_checkpoint_interval tokens
disable_chunked_mm_input disable_mm_preprocessor_cache enable_mm_processor_stats interleave_mm_strings
    io_processor_plugin media_io_kwargs mm_device_do_normalize mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
    mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
    mm_shm_cache_max_object_size_mb mm_tensor_ipc renderer_num_workers skip_mm_profiling
    video_pruning_method video_pruning_rate: @images
engram_config model_class_overrides model_impl: a package adds a model family with an entry point in the group
    'jpaged.models'
diffusion_config: models that generate by diffusion are not supported
num_gpu_blocks_override: kv_cache_memory_bytes or memory_utilization sets the size of the pool
long_prefill_token_threshold_adaptive max_num_active_seqs max_num_scheduled_tokens num_scheduler_steps scheduler_cls:
    scheduling_policy, max_num_seqs and max_num_batched_tokens steer the scheduler
scheduler_reserve_full_isl: a request is admitted when all of its prompt fits the pool
max_num_queued_reqs max_num_queued_tokens: @waiting
enable_trace_replay use_fp64_gumbel: draws depend on logits, seed and position only
num_speculative_tokens: drafts are checked by the model: give speculative= or speculative_config
speculative_model: give speculative=jpaged.DraftModel(folder), or speculative_config
override_generation_config: pass SamplingParams, or give generation_config= a folder with your generation_config.json
kv_sharing_fast_prefill prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit: prefixes are cached
    by blocks and evicted as prefix_eviction says
aggregate_engine_logging collect_detailed_traces custom_histogram_buckets enable_logging_iteration_details
    enable_mfu_metrics kv_cache_metrics kv_cache_metrics_sample per_request_spec_decode_metrics
    show_hidden_metrics_for_version: LLM.stats(), LLM.get_metrics() and the server's /metrics report, and requests have
    RequestOutput.metrics
log_config_file log_level logging_config: configure Python's logging of the logger 'jpaged'; `jpaged serve` has
    --log-level
enable_layerwise_nvtx_tracing profiler_config: @profiler
otlp_traces_endpoint reasoning_parser reasoning_parser_plugin served_model_name shutdown_timeout
    stream_interval tokens_only: @server
aux_output_config enable_return_routed_experts: @routing
return_sampling_mask: the tokens that could be drawn are not returned: logprobs has the most likely ones
skip_tokenizer_init: a model without a tokenizer takes and gives token ids; detokenize=False makes no text
tokenizer_mode: the tokenizer is the fast one of the model's folder
tokenizer_revision: give tokenizer= a folder with that tokenizer
use_v2_block_manager: blocks are allocated in one way
watermark_config: @watermark
weight_transfer_config: @changed_weights
additional_config fail_on_environ_validation: @extensions
"""
)
"""Settings of vLLM that are refused: what to use here."""

SAME: dict[str, tuple[object, ...]] = {
    "async_scheduling": (True,),
    "config_format": ("auto",),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "decode_context_parallel_size": (1,),
    "disable_custom_all_reduce": (True, False),
    "enable_sleep_mode": (True, False),
    "kv_offloading_size": (0,),
    "load_format": ("auto",),
    "logprobs_mode": ("raw_logprobs",),
    "model_impl": ("auto",),
    "node_rank": (0,),
    "nnodes": (1,),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "runner": ("auto", "generate", "pooling"),
    "scheduler_reserve_full_isl": (True,),
    "skip_tokenizer_init": (False,),
    "stream_interval": (1,),
    "task": ("auto", "generate", "embed", "classify", "score"),
    "tokenizer_mode": ("auto",),
    "use_tqdm_on_load": (True, False),
}
"""Values of such settings, next to None, that ask for the behaviour that jpaged has anyway."""

OFF = _words(
    """
    aggregate_ allow_ calculate_ cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port disable_ enable_ fully_ interleave_ kv_cache_metrics kv_sharing_ mm_encoder_only
    numa_bind ray_workers_ return_ skip_ sleep_mode_ specialize_ swa_ tokens_ use_
    """
)
"""Beginnings of settings of which False asks for nothing."""

# ---------------------------------------------------------------- the command line and the server

FLAGS = _table(
    """
allow_credentials allowed_headers allowed_methods: --cors-origin allows a page's origin; the other headers of CORS are
    fixed
allowed_origins: give --cors-origin for each origin
anthropic_disabled_thinking_effort: a request to /v1/messages says it: thinking={"type": "disabled"}
-asc api_server_count data_parallel_supervisor_port dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s headless: the server has one process with one engine: --tensor-parallel-size and
    --data-parallel-size spread it
config: give the flags themselves; a shell script keeps them
chat_template_content_format: the chat template takes messages and parts as it is written
cohere_format cohere_is_reasoning_model: there is no Cohere API: use /v1/chat/completions
default_chat_template_kwargs: send chat_template_kwargs in the request's body
disable_log_requests enable_log_deltas enable_log_outputs enable_log_requests max_log_len: the log has a line for each
    request, with its prompt and output only with --log-prompts
disable_access_log_for_endpoints disable_uvicorn_access_log: --log-level warning leaves the lines of requests out
disable_fastapi_docs enable_offline_docs: /docs needs nothing from other hosts, and is always there
enable_auto_tool_choice: --tool-parser is enough: the model chooses unless tool_choice says otherwise
enable_flash_late_interaction: pairs are scored by the model's head or by cosines
enable_force_include_usage: send stream_options={"include_usage": true}
enable_per_request_metrics: /metrics has histograms; answers say in usage how many tokens were cached
enable_prompt_tokens_details: usage always says how many tokens of a prompt were cached
enable_request_id_headers: every answer has the header X-Request-Id
enable_scale_out: there are no such routes: /tokenize, /detokenize and prompts of token ids serve instead
enable_server_load_tracking: /v1/load always reports the load
enable_ssl_refresh: start the server again with new certificates
enforce_eager: --no-warmup compiles each shape at its first use
exclude_tools_when_tool_choice_none: send tool_choice="none" without tools
fingerprint_mode fingerprint_value: answers have no system_fingerprint; /version has the version
grpc grpc_port: there is no gRPC: use HTTP
h11_max_header_count h11_max_incomplete_event_size: the head of a request may have 64 KiB, and --max-body-bytes bounds
    its body
-i -o input_file output_file output_tmp_dir: run-batch takes IN and OUT without flags
log_error_stack: errors are logged with their causes
middleware root_path uds: put a proxy before the server
response_role: answers are the assistant's
return_tokens_as_token_ids: send return_token_ids=true
sse_keep_alive_interval: chunks come with each token
ssl_ca_certs ssl_cert_reqs ssl_ciphers: a proxy before the server checks the clients' certificates
tool_call_parser: give --tool-parser
tool_parser_plugin tool_server: --tool-parser names one of the formats that docs/serving.md lists
tool_strict_level: a tool with "strict": true follows its schema
trust_request_chat_template: the chat template is the model's, or the file of --chat-template
trust_request_mm_kwargs: @images
uvicorn_log_level: give --log-level
-sc spec_method spec_model spec_tokens speculative_config: give --speculative, such as ngram@4, draft:MODEL@4 or
    eagle3:MODEL@4
-tp: give --tensor-parallel-size
-dp: give --data-parallel-size
-ep: give --enable-expert-parallel
-q: give --quantization
device_memory_utilization: give --gpu-memory-utilization or --memory-utilization
-O -cc: @compiler
-ac: @kernels
-dc: @extensions
-dcp -dpa -dpb -dpe -dph -dpl -dpm -dpn -dpp -dpr -n -pcp -pp -r: @cluster
model_name url: `jpaged chat` and run-batch run the model themselves: give --model; a server has clients of
    OpenAI's API
system_prompt: give --system
quick: `jpaged generate PROMPT` answers once
stats: `jpaged generate` and `jpaged bench serve` report times
append_result label metadata metric_percentiles output_json percentile_metrics result_dir result_filename save_detailed
    save_result: the answers of `jpaged bench serve` go to --out
custom_output_len dataset_name dataset_path disable_shuffle input_len no_oversample num_warmups output_len prefix_len
    random_batch_size range_ratio skip_chat_template: --prompts takes a file of prompts, --trace lengths and beginnings;
    the default load is drawn by --mean-input
backend enable_multimodal_chat: `jpaged bench serve` speaks OpenAI's API to any server: --endpoint names the path
base_url: give --url
num_prompts: give --num-requests
probe_request_rate ramp_up_end_rps ramp_up_start_rps ramp_up_strategy request_rate self_timed: give --rate, once for
    each rate
goodput: give --limit-ttft, --limit-token and --limit-latency
num_iters_warmup ready_check_timeout_sec: give --warmup
chat_template_kwargs extra_body frequency_penalty logprobs min_p presence_penalty repetition_penalty temperature top_k
    top_p use_beam_search: `jpaged bench serve` measures the server's defaults: set them with --generation-config when
    it starts
header insecure request_id_prefix: give --api-key; other headers are not sent
plot_dataset_stats plot_timeline timeline_itl_thresholds: give --plot
disable_tqdm: no progress bar is shown
profile: @profiler
lora_assignment lora_path: adapters are models of a server: --model names one
no_stream: answers are streamed, which their times need
async_engine batch_size disable_detokenize input n no_reranker num_iters output
    prequeue_requests: `jpaged bench throughput` measures a batch and one sequence
enable_metrics host port: `jpaged serve` listens, and its /metrics report
model: `jpaged serve MODEL` takes it without a flag
"""
)
"""Flags of vLLM's commands that ours lack and that are no settings of an engine, or mean another thing on a server."""

FLAG_FAMILIES = _words(
    """
    asr_ bfcl_ blazedit_ custom_ hf_ prefix_repetition_ random_ sharegpt_ spec_bench_ speed_bench_ timed_trace_
    """
)
"""Beginnings of flags of ``vllm bench``, each of one kind of data: the reason is that of --dataset-name."""

COMMANDS = _table(
    """
collect-env: `pip list` and `jpaged plan` say what is installed and which devices there are
complete: `jpaged generate PROMPT` continues a text
download-kernels: kernels are part of the package
launch: `jpaged serve` starts the server
latency: `jpaged bench throughput` measures one sequence too
mm-processor: there is no benchmark of images
preload: `jpaged compile` keeps compiled programs in a folder
render: the server's /tokenize renders messages
snapshot: LLM.save_state() and `jpaged serve --state-dir` save an engine's state
startup: scripts/first_run.py of the repository times starts
sweep: `jpaged bench serve` takes --rate several times
"""
)
"""Commands that ours lack."""

ROUTES = _table(
    """
/abort_requests /inference/v1/abort_requests: send DELETE or close the connection: its request is aborted
/cohere/v2/chat /cohere/v2/chat/render /invocations /v1/chat/completions/batch /v1/messages/render: use
    /v1/chat/completions
/inference/v1/generate /v1/chat/completions/derender /v1/completions/derender: send prompts of token ids to
    /v1/completions, with return_token_ids=true
/v1/chat/completions/render /v1/completions/render /v1/responses/render: use /tokenize, which takes messages too
/generative_scoring /pooling /v1/systemone /v2/embed: use /v1/embeddings, /classify or /v1/score
/v1/audio/transcriptions /v1/audio/translations /v1/realtime: models that hear are not supported
/v1/load_lora_adapter /v1/unload_lora_adapter: give --lora-modules name=folder when the server starts
/ready /readyz: use /health
/load: use /v1/load
/server_info: use /version and /v1/models
/reset_encoder_cache /reset_mm_cache: images' features are cached with their prefixes: POST /reset_prefix_cache forgets
    both
/collective_rpc /fault_tolerance/apply /fault_tolerance/status /finish_weight_update /get_world_size
    /init_weight_transfer_engine /is_paused /is_scaling_elastic_ep /is_sleeping /kv_event_sources /pause
    /release_kv_cache_memory /resume /scale_elastic_ep /shutdown_weight_transfer_engine /sleep
    /start_draft_weight_update /start_profile /start_weight_update /stop_profile /update_weight_version /update_weights
    /wake_up /weight_checker /weight_info: it is no route of a running server: the methods of AsyncLLM do it in Python
"""
)
"""Paths of vLLM's server that ours lacks."""

_GENERATION = """
ec_transfer_params kv_transfer_params: @transfer
guided_decoding_backend: llguidance follows all shapes
guided_json: give structured_outputs={"json": ...}
guided_regex: give structured_outputs={"regex": ...}
guided_choice: give structured_outputs={"choice": ...}
guided_grammar: give structured_outputs={"grammar": ...}
logits_processors: logit_bias, allowed_token_ids, bad_words and structured_outputs change what can be drawn
logprob_token_ids: log-probabilities are those of the most likely tokens
media_io_kwargs mm_payload return_mm_kwargs: @images
repetition_detection: repetition_penalty, frequency_penalty and presence_penalty make repetition less likely
return_token_offsets: /tokenize has the texts of tokens, with return_token_strs=true
return_tokens_as_token_ids: send return_token_ids=true
routed_experts_prompt_start: @routing
session_id: prefixes are found by their tokens; cache_salt keeps them apart
stream_interval: chunks come with each token
truncation_side: truncate_prompt_tokens keeps the last tokens
vllm_xargs: @extensions
watermarking: @watermark
"""
FIELDS: dict[str, Reasons] = {
    "completion": _table(_GENERATION + "mm_processor_kwargs: @images\nprompt_embeds: @embeds\n"),
    "chat": _table(
        _GENERATION
        + """
add_special_tokens: the chat template writes the special tokens
echo: /v1/completions has it
return_prompt_text: /tokenize renders messages
"""
    ),
    "response": _table(
        """
chat_template_kwargs frequency_penalty include_reasoning include_stop_str_in_output logit_bias presence_penalty
    skip_special_tokens stop_token_ids structured_outputs: /v1/chat/completions has it
ec_transfer_params kv_transfer_params: @transfer
enable_response_messages previous_input_messages: give previous_response_id, or send the conversation as input
media_io_kwargs mm_payload return_mm_kwargs: @images
request_id: the header X-Request-Id names a request
session_id: prefixes are found by their tokens
vllm_xargs: @extensions
watermarking: @watermark
"""
    ),
    "vectors": _table(
        """
add_special_tokens: the tokenizer adds them
cache_salt: the salt is that of the caller's key
chat_template_kwargs instruction: write the instruction into the text
embed_dtype endianness: vectors are numbers, or with encoding_format="base64" little-endian float32
max_tokens_per_doc max_tokens_per_query truncate_prompt_tokens truncation_side: one that is too long is refused
mm_processor_kwargs: @images
padding: the engine pads what it needs
priority: requests are served in order of arrival
request_id: the header X-Request-Id names a request
use_activation: vectors have length 1 and scores are probabilities, where the checkpoint asks for it
"""
    ),
    "tokenize": _table(
        """
chat_template: it is the model's, or the file of --chat-template
media_io_kwargs: @images
"""
    ),
}
"""Fields of the bodies of vLLM's server that ours refuses, by the kind of body."""

# ---------------------------------------------------------------- classes and calls

MEMBERS: dict[str, Reasons] = {
    "LLM": _table(
        """
apply_model: the weights are LLM.params, the model's description LLM.model_config
collective_rpc get_world_size: @workers
encode pooling_io_processors pooling_task: @pooled
reward: use LLM.classify(), whose outputs have the logits
engine_core: LLM.stats(), LLM.memory_report() and LLM.config tell what it does
get_default_pooling_params: use PoolingParams(), which takes what the model's folder says
engine_class llm_engine request_counter: use LLM.config and LLM.model_config for settings, LLM.get_tokenizer(),
    LLM.stats() and LLM.get_metrics() for its state, and AsyncLLM to add and abort requests while others run
enqueue enqueue_chat wait_for_completion: LLM.generate() returns when all is done; AsyncLLM adds requests while others
    run
preprocess_chat renderer: use LLM.chat_prompt()
chat_template chat_template_config: give chat_template= when you make the LLM, or to LLM.chat()
default_sampling_params: use LLM.get_default_sampling_params()
set_tokenizer: give tokenizer= when you make the LLM
start_profile: call jax.profiler.start_trace(folder)
stop_profile: call jax.profiler.stop_trace()
runner_type supported_tasks: LLM.config and LLM.model_config describe the engine and its model
finish_weight_update init_weight_transfer_engine shutdown_weight_transfer_engine start_draft_weight_update
    start_weight_update update_weights: @changed_weights
get_weight_version update_weight_version: @versions
release_kv_cache_memory: call LLM.release_memory()
reset_encoder_cache reset_mm_cache: @mm_cache
"""
    ),
    "AsyncLLM": _table(
        """
add_lora list_loras pin_lora remove_lora: give lora_request= with a request: an adapter is read at its first use, and
    AsyncLLM.adapters names them
add_request: AsyncLLM.generate() adds requests while others run; AsyncLLM.embed() those for vectors
admission_stats check_admission: @waiting
checkpoint_prepare checkpoint_restore: save_state() and load_state() keep an engine's state
collective_rpc output_handler: @workers
compute_weight_checksums finish_weight_update init_weight_transfer_engine shutdown_weight_transfer_engine
    start_draft_weight_update start_weight_update update_weights: @changed_weights
get_weight_version update_weight_version: @versions
dead_error errored get_status handle_fault is_running is_stopped: await check_health() raises EngineStopped, with its
    cause, where the engine has failed or was shut down
do_log_stats log_requests log_stats logger_manager: @logs
encode get_supported_tasks: @pooled
engine engine_core: AsyncLLM.stats(), memory_report() and config tell what it does
from_vllm_config: give EngineArgs to AsyncLLM.from_engine_args(), or the settings to AsyncLLM()
get_kv_event_sources notify_kv_transfer_request_rejected: @transfer
get_num_queued_tokens get_num_unfinished_requests: stats() counts running and waiting requests
is_paused: await is_sleeping() says whether memory was released
pause_generation resume_generation: release_memory() lets requests wait with their tokens, restore_memory() lets them go
    on
is_tracing_enabled observability_config: @traces
get_model_config get_vllm_config scheduler_config vllm_config: AsyncLLM.config has the engine's settings
profiler start_profile stop_profile: @profiler
release_kv_cache_memory: call AsyncLLM.release_memory()
renderer: use AsyncLLM.chat_prompt()
reset_encoder_cache reset_mm_cache: @mm_cache
scale_elastic_ep wait_for_requests_to_drain: the engine has a fixed number of devices: start another one
"""
    ),
    "EngineArgs": _table(
        """
create_diffusion_config create_engine_config create_load_config create_logging_config create_model_config
    create_observability_config create_speculative_config create_structured_outputs_config create_watermark_config
    get_batch_defaults validate_tensorizer_args: give the EngineArgs to LLM.from_engine_args() or
    AsyncLLM.from_engine_args(), which check all settings
"""
    ),
    "SamplingParams": _table(
        """
all_stop_token_ids bad_words_token_ids eos_token_id output_text_buffer_length verify: the engine keeps the parameters of
    a request: these have only what you gave
num_logprobs: logprobs is the number that was asked for
sampling_type: temperature 0 takes the most likely token, seed fixes the draws
update_from_generation_config: LLM.get_default_sampling_params() has what generation_config.json says
update_from_tokenizer: texts are tokenized when the request is made
for_sampler_warmup: make SamplingParams() with what you need
"""
    ),
    "StructuredOutputsParams": _table(
        """
all_constraints_none all_non_structural_tag_constraints_none: one kind is always given, and StructuredOutputsParams.kind
    names it
"""
    ),
    "BeamSearchParams": {},
    "PoolingParams": _table(
        """
all_parameters valid_parameters verify: each method says which parameters it reads
"""
    ),
    "LoRARequest": {},
    "RequestOutput": _table(
        """
add: output_kind=RequestOutputKind.CUMULATIVE gives everything so far
encoder_prompt encoder_prompt_token_ids: @encoder
ec_transfer_params kv_transfer_params: @transfer
lora_request: @knows
num_cache_creation_tokens: num_cached_tokens counts what the prefix cache gave
prompt_token_id_logprobs: give prompt_logprobs
"""
    ),
    "CompletionOutput": _table(
        """
lora_request: @knows
routed_experts: @routing
sampling_mask: give logprobs for the most likely tokens
spec_decode_metrics: LLM.stats() counts drafts
weight_versions: @versions
"""
    ),
    "PoolingRequestOutput": _table(
        """
error: a prompt that is refused raises
"""
    ),
    "EmbeddingOutput": _table(
        """
from_base: @from_tensor
"""
    ),
    "ClassificationOutput": _table(
        """
from_base: @from_tensor
"""
    ),
    "ScoringOutput": _table(
        """
from_base: @from_tensor
"""
    ),
    "BeamSearchSequence": _table(
        """
get_prompt orig_prompt: RequestOutput has the prompt, and tokens begins with it
logprobs: cum_logprob is their sum
lora_request: @knows
"""
    ),
    "RequestMetrics": _table(
        """
num_generation_tokens: count the token_ids of RequestOutput.outputs
is_corrupted: logits that are not numbers end the request with an error
is_watermark_skipped is_watermarked: @watermark
"""
    ),
}
"""Attributes and methods of vLLM's classes that ours lack, by our class."""

PARAMETERS: dict[str, Reasons] = {
    "SamplingParams": _table(
        """
best_of: give n, and choose among the outputs by cumulative_logprob
early_stopping length_penalty use_beam_search: call beam_search() with BeamSearchParams
extra_args: @extensions
flat_logprobs: log-probabilities come as a list of mappings
guided_decoding: give structured_outputs=StructuredOutputsParams(...), with the same arguments
logits_processors: @logits
logprob_token_ids prompt_logprob_token_ids: logprobs=-1 has those of the whole vocabulary
prompt_logprob_start: prompt_logprobs has all tokens of the prompt but the first
repetition_detection: repetition_penalty, frequency_penalty and presence_penalty make repetition less likely
routed_experts_prompt_start: @routing
skip_clone: parameters are copied where they are kept
skip_reading_prefix_cache: a cache_salt in the prompt keeps requests apart
stream_interval: output_kind says what a stream yields, with each new token
trace_decode_token_ids: prompts can be token ids
watermarking: @watermark
"""
    ),
    "StructuredOutputsParams": _table(
        """
backend: llguidance follows all shapes
disable_additional_properties: write "additionalProperties": false into the schema
disable_fallback: there is one backend
structural_tag: give grammar=, which can mix free text and JSON
whitespace_pattern: disable_any_whitespace=True allows none
"""
    ),
    "BeamSearchParams": _table(
        """
skip_special_tokens: special tokens are left out of the text, and output.token_ids has them
structured_outputs: use SamplingParams(structured_outputs=...)
watermarking: @watermark
"""
    ),
    "PoolingParams": _table(
        """
activation softmax: classify() and score() apply what the checkpoint asks for, and classify()'s outputs have the logits
extra_kwargs: @extensions
late_interaction_params: score() compares vectors of whole texts
output_kind: outputs are whole
requires_token_ids: outputs always have prompt_token_ids
returned_token_ids step_tag_id: there are no rewards of single tokens
skip_reading_prefix_cache: a cache_salt in the prompt keeps requests apart
task: call embed(), classify() or score()
truncate_prompt_tokens: give embed() tokenization_kwargs={'truncation': True, 'max_length': ...}
use_activation: embed() has normalize; classify() and score() apply what the checkpoint asks for, and classify()'s
    outputs have the logits
"""
    ),
    "LoRARequest": _table(
        """
base_model_name: the adapter is one of the engine's own model
load_inplace: another folder under the same name is refused: give it another name
is_3d_lora_weight: adapters of routed experts are not read
lora_local_path: give lora_path
long_lora_max_len: the rotary scaling is the model's
tensorizer_config_dict: tensors are files in a PEFT folder
"""
    ),
}
PARAMETERS["EngineArgs"] = (
    INSTEAD
    | {name: reason for name, (_, reason) in ALWAYS.items()}
    | {name: f"{DRAFTS} has its {key}" for name, key in DRAFT_KEYS.items()}
)
"""Parameters of vLLM's classes that ours lack, by the class."""

_CALLS = _table(
    """
mm_processor_kwargs: give prompt={'prompt': text, 'mm_processor_kwargs': {...}}
concurrency_limit: max_num_seqs bounds the sequences of a step
pooling_params: classify() and score() have no parameters: the checkpoint says what its head needs
pooling_task: @pooled
reset_running_requests: requests end first, or AsyncLLM.abort() ends them
reset_connector: @transfer
mode: requests wait with their tokens (mode='keep'); AsyncLLM.abort() ends them
trace_headers: @traces
data_parallel_rank: the engine chooses the replica, by where the prefix is cached
session_id kv_hints: prefixes are found by their tokens
reasoning_ended reasoning_parser_kwargs: @server
prompt_text: give prompt={'prompt_token_ids': ids, 'prompt': text}
prompt_token_ids: give prompt={'prompt_token_ids': ids}
internal: abort() takes the names of requests
timeout: it waits until the requests have been aborted
start_engine_loop: the engine's thread starts at once
usage_context: usage is not reported to anyone
stat_loggers: @logs
chat_template score_template: give chat_template= when you make the LLM
truncate_prompt_tokens: give SamplingParams(truncate_prompt_tokens=...), or tokenization_kwargs to embed()
guided_options_request: @grammars
prompt_adapter_request: prompt adapters are not supported: give lora_request
"""
)
_ARGUMENTS = {
    "LLM.generate": "mm_processor_kwargs guided_options_request prompt_adapter_request truncate_prompt_tokens",
    "LLM.beam_search": "concurrency_limit",
    "LLM.embed": "pooling_task truncate_prompt_tokens",
    "LLM.classify": "pooling_params",
    "LLM.score": "chat_template pooling_params score_template truncate_prompt_tokens",
    "LLM.reset_prefix_cache": "reset_running_requests reset_connector",
    "LLM.sleep": "mode",
    "AsyncLLM.generate": "prompt_text prompt_token_ids trace_headers data_parallel_rank session_id kv_hints "
    "reasoning_ended reasoning_parser_kwargs truncate_prompt_tokens",
    "AsyncLLM.abort": "internal",
    "AsyncLLM.reset_prefix_cache": "reset_running_requests reset_connector",
    "AsyncLLM.sleep": "mode",
    "AsyncLLM.shutdown": "timeout",
    "AsyncLLM.from_engine_args": "start_engine_loop usage_context stat_loggers",
}
ARGUMENTS = {method: {name: _CALLS[name] for name in names.split()} for method, names in _ARGUMENTS.items()}
"""Arguments of vLLM's methods that ours lack, by the method."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "mode": ("keep",),
    "data_parallel_rank": (0,),
    "start_engine_loop": (True,),
}
"""Values of such arguments, next to None, False and an empty mapping, that ask for what is done anyway."""

PROMPT_KEYS = _table(
    """
decoder_prompt encoder_prompt: @encoder
media_io_kwargs multi_modal_uuids: @images
prompt_embeds: @embeds
prompt_token_offsets: output.prompt_token_ids has the tokens
token_type_ids: score() makes the types of a pair's tokens
"""
)
"""Keys of prompts that are refused, unless nothing is in them."""

# ---------------------------------------------------------------- modules

_OUTPUT_NAMES = {
    **{
        name: f"jpaged.outputs:{name}"
        for name in (
            "CompletionOutput",
            "RequestOutput",
            "EmbeddingOutput",
            "ClassificationOutput",
            "ScoringOutput",
            "PoolingRequestOutput",
        )
    },
    **dict.fromkeys(
        ("EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"),
        "jpaged.outputs:PoolingRequestOutput",
    ),
}
_ARGS = {"EngineArgs": "jpaged.engine_args:EngineArgs", "AsyncEngineArgs": "jpaged.engine_args:EngineArgs"}
_ASYNC = {"AsyncLLM": "jpaged.async_llm:AsyncLLM", "AsyncLLMEngine": "jpaged.async_llm:AsyncLLM"}
_INPUT_NAMES = {name: f"jpaged.inputs:{name}" for name in ("PromptType", "TextPrompt", "TokensPrompt")}
_BEAM_NAMES = {
    "BeamSearchOutput": "jpaged.outputs:RequestOutput",
    "BeamSearchSequence": "jpaged.outputs:BeamSearchSequence",
}

TAKEN: dict[str, dict[str, str]] = {
    "": {**_ARGS, **_ASYNC, **_INPUT_NAMES, **_OUTPUT_NAMES},
    "beam_search": _BEAM_NAMES,
    "config": {"ReasoningConfig": "jpaged.reasoning_config:ReasoningConfig"},
    "engine.arg_utils": _ARGS,
    "engine.async_llm_engine": _ASYNC,
    "entrypoints.generate.beam_search.utils": _BEAM_NAMES,
    "entrypoints.llm": {"LLM": "jpaged.llm:LLM"},
    "inputs": _INPUT_NAMES,
    "inputs.data": _INPUT_NAMES,
    "inputs.llm": _INPUT_NAMES,
    "logprobs": {"Logprob": "jpaged.outputs:Logprob"},
    "lora.request": {"LoRARequest": "jpaged.lora_request:LoRARequest"},
    "outputs": _OUTPUT_NAMES,
    "sequence": {"Logprob": "jpaged.outputs:Logprob", "RequestMetrics": "jpaged.outputs:RequestMetrics"},
    "utils": {"FlexibleArgumentParser": "argparse:ArgumentParser"},
    "utils.argparse_utils": {"FlexibleArgumentParser": "argparse:ArgumentParser"},
    "v1.engine.async_llm": _ASYNC,
    "v1.engine.exceptions": {"EngineDeadError": "jpaged.errors:EngineStopped"},
    "v1.metrics.reader": {name: f"jpaged.metrics:{name}" for name in ("Counter", "Gauge", "Histogram", "Metric")},
    "v1.metrics.stats": {"RequestStateStats": "jpaged.outputs:RequestMetrics"},
    "version": {"__version__": "jpaged:__version__", "__version_tuple__": "jpaged:__version_tuple__"},
}
"""Modules of vLLM, without its name, that can be imported from jpaged -> names -> our module and name."""

IMPORTS = _table(
    """
GuidedDecodingParams: use StructuredOutputsParams, with the same arguments, as SamplingParams(structured_outputs=...)
EngineCore LLMEngine: use LLM, or AsyncLLM to add and abort requests while others run
ModelRegistry: @family
initialize_ray_cluster: call jax.distributed.initialize() in each process; scripts/ray runs replicas over Ray Serve
PoolingOutput encode: LLM.embed(), classify() and score() return vectors, classes and scores
SamplingType: temperature 0 takes the most likely token, seed fixes the draws
Vector: metrics have counters, gauges and histograms
EmbedsPrompt: @embeds
ExplicitEncoderDecoderPrompt: @encoder
AttentionConfig AuxOutputConfig CUDAGraphMode CacheConfig CompilationConfig CompilationMode ConfigType DeviceConfig
    DiffusionConfig DynamicShapesConfig DynamicShapesType ECTransferConfig EPLBConfig EncoderCacheManagerConfig
    EngramConfig FaultToleranceConfig HiSparseConfig KVEventsConfig KVTransferConfig KernelConfig LoRAConfig LoadConfig
    LoggingConfig MambaConfig ModelConfig MultiModalConfig ObservabilityConfig OffloadBackend OffloadConfig
    ParallelConfig PassConfig PoolerConfig PrefetchOffloadConfig ProfilerConfig SchedulerConfig
    SpeculativeConfig SpeechToTextConfig SpeechToTextParams StructuredOutputsConfig SupportsMetricsInfo UVAOffloadConfig
    VllmConfig WatermarkConfig WeightTransferConfig config get_attr_docs get_cached_compilation_config
    get_current_vllm_config get_current_vllm_config_or_none get_layers_from_vllm_config is_init_field
    iter_architecture_defaults replace set_current_vllm_config str_dtype_to_torch_dtype try_match_architecture_defaults
    update_config: @settings
cleanup_dist_env_and_memory: close the LLM, or leave its `with`: its devices' memory is free then
get_world_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size: @workers
envs ir: configure kernels by the devices, programs by warmup() and enforce_eager
StructuredOutputsConfig: give structured_outputs of SamplingParams
"""
)
"""Names that jpaged and its modules lack where vLLM's have them."""

MODULES = _table(
    """
assets collect_env connections env_override exceptions logger logging_utils scalar_type third_party usage utils: it is a
    tool of vLLM's own, for which the standard library or the library that it wraps serves
_aiter_ops _custom_ops _xpu_ops attention cute_utils kernels tilelang_utils triton_utils v1.attention vllm_flash_attn:
    kernels are chosen by the devices; pallas_kernels has ours, each with a jnp reference
compilation forward_context ir: @compiler
config: @settings
device_allocator: LLM.sleep() and release_memory() free devices' memory
distributed.ec_transfer distributed.kv_events distributed.kv_transfer v1.kv_offload: @transfer
distributed.weight_transfer model_executor.model_loader.reload: @changed_weights
distributed.parallel_state: one process drives all devices; close the LLM, or leave its `with`, to free their memory
distributed.device_communicators distributed.utils executor ray v1.executor: @cluster
engine.llm_engine v1.engine.llm_engine: use LLM, or AsyncLLM to add and abort requests while others run
engine.arg_utils: @settings
engine.async_llm_engine engine.protocol: AsyncLLM is the interface of an engine
inputs: prompts are texts, token ids, or the mappings TextPrompt and TokensPrompt
beam_search logprobs sequence: jpaged.outputs has all outputs
entrypoints: `jpaged serve` and `jpaged run-batch` are commands; a body's fields are in the server's /openapi.json
envs: JAX's and jpaged's settings have their own names: see docs/api/config.md
plugins: @extensions
multimodal: @images
lora: @lora
lora.resolver: lora_modules names the adapters that requests may use
logits_process v1.sample: @logits
model_executor model_inspection models: @family
model_executor.determinism: give deterministic=True to LLM(...)
model_executor.model_loader: `jpaged convert` and `jpaged quantize` save checkpoints; all formats are read at the start
model_executor.layers.quantization: quantization= names a form of weights; docs/adding_a_weight_format.md adds one
platforms: jax.devices() says which devices there are
profiler: @profiler
parser reasoning tool_parsers: --reasoning-parser and --tool-parser of `jpaged serve` name the formats; both name
    rows of jpaged/answers/rows.py
entrypoints.chat_utils renderers: LLM.chat_prompt() renders messages; chat_template= takes the text of a template
snapshot: LLM.save_state() and load_state() keep an engine's state
tasks: @pooled
tokenizers transformers_utils.tokenizer: LLM.get_tokenizer() returns the tokenizer, as a transformers object
transformers_utils: the hub's client is the package huggingface_hub
tracing: @traces
benchmarks: `jpaged bench serve` and `jpaged bench throughput` measure
core v1 worker: parts of the engine are not public: LLM and AsyncLLM, with stats(), memory_report() and memory_map(),
    are
engine.metrics v1.metrics: LLM.get_metrics() and the server's /metrics report
v1.watermarking: @watermark
spec_decode v1.spec_decode: LLM.stats() counts drafts; speculative= says how they are made
"""
)
"""Modules of vLLM, without its name, that jpaged lacks; a row holds for the modules within too."""
