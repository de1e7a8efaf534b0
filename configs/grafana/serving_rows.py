"""The rows about requests and the engine: load, latency, buckets and the start."""

from configs.grafana.panels import Query, Row, areas, bars, gauge, largest, lines, mean, number, percentiles, rate


def overview() -> Row:
    requests = [
        Query(gauge("vllm:num_requests_running"), "running {{model_name}}"),
        Query(gauge("vllm:num_requests_waiting"), "waiting {{model_name}}"),
    ]
    finished = Query(rate("vllm:request_success", "model_name, finished_reason"), "{{finished_reason}} {{model_name}}")
    tokens = [
        Query(rate("vllm:prompt_tokens"), "prompt {{model_name}}"),
        Query(rate("vllm:prompt_tokens_cached"), "prompt, cached {{model_name}}"),
        Query(rate("vllm:generation_tokens"), "generation {{model_name}}"),
    ]
    return Row(
        "Overview",
        [
            lines(
                "Requests running and waiting",
                "Requests being computed and in the queue: a queue that stays is more work than the engine takes.",
                "short",
                requests,
            ),
            areas(
                "Requests finished",
                "Requests ended per second by reason: length means cut off at max_tokens, abort that the client left.",
                "reqps",
                [finished],
            ),
            lines(
                "Token throughput",
                "Prompt tokens, those of them that the prefix cache held, and generated tokens, per second.",
                "suffix:tokens/s",
                tokens,
            ),
            lines(
                "Prompt length",
                "Prompt tokens of a request, images included: what prefill and the KV cache have to hold.",
                "suffix:tokens",
                percentiles("vllm:request_prompt_tokens"),
            ),
            lines(
                "Answer length",
                "Tokens generated for a request: end-to-end latency grows with them.",
                "suffix:tokens",
                percentiles("vllm:request_generation_tokens"),
            ),
            lines(
                "Longest choice",
                "Most tokens generated for one choice of a request: below the answer length where clients set n.",
                "suffix:tokens",
                percentiles("vllm:request_max_num_generation_tokens"),
            ),
        ],
    )


LATENCIES = (
    (
        "Time to first token",
        "From arrival to the first token: what a reader waits before anything appears.",
        "vllm:time_to_first_token_seconds",
    ),
    (
        "Inter-token latency",
        "Between two tokens of an answer: a high p99 means that prefill steps interrupt decoding.",
        "vllm:inter_token_latency_seconds",
    ),
    (
        "Time per output token",
        "A request's mean time between tokens: the reading speed that one client sees.",
        "vllm:request_time_per_output_token_seconds",
    ),
    (
        "End-to-end latency",
        "From arrival to the last token: what a client that does not stream waits.",
        "vllm:e2e_request_latency_seconds",
    ),
    (
        "Queue time",
        "From arrival at the scheduler to being scheduled first: the first to grow when capacity is short.",
        "vllm:request_queue_time_seconds",
    ),
    (
        "Prefill time",
        "From being scheduled first to the first token, the encoding of images included.",
        "vllm:request_prefill_time_seconds",
    ),
    (
        "Decode time",
        "From the first token to the last: it follows answer length and batch size.",
        "vllm:request_decode_time_seconds",
    ),
    (
        "Inference time",
        "From being scheduled first to the last token: what a request costs without its queue time.",
        "vllm:request_inference_time_seconds",
    ),
)


def latency() -> Row:
    panels = [lines(title, says, "s", percentiles(name), width=6) for title, says, name in LATENCIES]
    return Row("Latency", [*panels])


def engine() -> Row:
    bucket, name = "model_name, bucket_name", "{{bucket_name}} {{model_name}}"
    return Row(
        "Engine: buckets and start",
        [
            areas(
                "Executions per bucket, the ten most",
                "Graph executions per second: a bucket that never runs costs only compilation time. One compiled after "
                "the warm-up met a shape that it should not have.",
                "suffix:/s",
                [
                    Query(largest(rate("vllm_neuron:neff_execution_count", bucket)), name),
                    Query(rate("vllm_neuron:graphs_compiled_after_warm_up", bucket), f"{name}, compiled late"),
                ],
            ),
            lines(
                "Sequence padding per bucket, the ten worst",
                "Mean number of sequences that an execution was padded by: if high, add a size to buckets.decode_seqs.",
                "suffix:sequences",
                [Query(largest(mean("vllm_neuron:num_seqs_padding", bucket)), name)],
            ),
            lines(
                "Token padding per bucket, the ten worst",
                "Mean number of tokens that an execution was padded by: if high, add a size to buckets.prefill_tokens.",
                "suffix:tokens",
                [Query(largest(mean("vllm_neuron:num_batched_tokens_padding", bucket)), name)],
            ),
            lines(
                "Tokens per step",
                "Tokens computed in one step: near scheduler.max_num_batched_tokens, prefill is the limit.",
                "suffix:tokens",
                percentiles("vllm:iteration_tokens_total"),
                width=12,
            ),
            bars(
                "Compilation time per bucket, the ten longest",
                "Time of each graph's first execution, its compilation included: what a bucket adds to the start.",
                "s",
                Query(largest(gauge("vllm_neuron:compilation_time_seconds", bucket, over="max")), name),
            ),
            areas(
                "Restarts of the gang",
                "Restarts per second because a rank died, hung, raised or differed: each is a pause for every request. "
                "The log names the rank and what was computed again.",
                "suffix:/s",
                [Query(rate("vllm_neuron:rank_restarts", "model_name, reason"), "{{reason}} {{model_name}}")],
            ),
            number(
                "Startup time",
                "From the replica's start until the engine was ready: how long a new replica takes to help.",
                "s",
                Query(gauge("vllm_neuron:startup_time_seconds", over="max")),
            ),
            number(
                "Model load time",
                "Until every rank had its weights: the part of the start that the checkpoint's storage decides.",
                "s",
                Query(gauge("vllm_neuron:model_load_time_seconds", over="max")),
            ),
            number(
                "Model size",
                "Weights in device memory, summed over the ranks of one engine.",
                "bytes",
                Query(gauge("vllm_neuron:model_load_size_bytes", over="max")),
            ),
        ],
    )
