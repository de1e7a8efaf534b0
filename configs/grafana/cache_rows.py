"""The rows about the caches: hit rates in the order of the request path, occupancy, KV blocks, the connector."""

from configs.grafana.panels import Query, Row, areas, gauge, lines, names, per_rank, rate

DEVICE = "vllm_neuron:device_encoder_cache"
CONNECTOR = "vllm_neuron:ec_connector"


HIT_RATES = (
    (
        "1 processor cache",
        "Share of media items whose processed pixels were found, so that nothing was decoded or resized.",
        "vllm:mm_cache",
    ),
    (
        "2b prefix cache",
        "Share of looked-up prompt tokens whose KV blocks were found, so that they were not prefilled.",
        "vllm:prefix_cache",
    ),
    (
        "2a scheduler encoder cache, lookups",
        "Share of lookups that found the image encoded; images wholly inside the prefix hit are never looked up.",
        "vllm_neuron:scheduler_encoder_cache",
    ),
    (
        "2a encoder cache, per request",
        "The same counted once per request and item: the share of images that cost no encoding.",
        "vllm:encoder_cache",
    ),
)


def cache_layers() -> Row:
    layers = [
        lines(title, says, "percentunit", [Query(f"{rate(f'{name}_hits')} / {rate(f'{name}_queries')}")])
        for title, says, name in HIT_RATES
    ]
    device = Query(f"1 - {rate(f'{DEVICE}_misses')} / {rate(f'{DEVICE}_queries')}")
    sizes = "block_size, num_gpu_blocks, enable_prefix_caching, encoder_cache_block_size, encoder_cache_num_blocks"
    settings = Query(
        gauge("vllm:cache_config_info", f"model_name, world_size, {sizes}", over="max"),
        "{{model_name}}: {{world_size}} ranks; KV {{num_gpu_blocks}} x {{block_size}} tokens, prefix caching "
        "{{enable_prefix_caching}}; encoder {{encoder_cache_num_blocks}} x {{encoder_cache_block_size}} embeddings",
    )
    return Row(
        "Cache layers: hit rates in the order of the request path",
        [
            *layers,
            lines(
                "3 device encoder cache",
                "Share of the items checked on the device that were present: 0 is normal, as the scheduler sends only "
                "what it does not hold, and more means that the two disagree.",
                "percentunit",
                [device],
            ),
            names("Cache settings", "The sizes that the engine runs with, to read the other panels by.", settings),
        ],
    )


PER_RANK = (
    ("active", "Blocks allocated to cached items on each rank: the ranks agree, so a second line is a rank astray."),
    ("free", "Blocks that can be allocated on each rank: near 0, the next new image evicts an old one."),
    ("held", "Freed blocks on each rank that encoder_cache.min_hold_time_ms keeps from being allocated again."),
)


def device_encoder_cache() -> Row:
    rank = "rank {{rank}} {{model_name}}"
    by_state = [Query(gauge(f"{DEVICE}_{state}_blocks"), f"{state} {{{{model_name}}}}") for state, _ in PER_RANK]
    real_tokens, active_blocks = gauge(f"{DEVICE}_active_real_tokens"), gauge(f"{DEVICE}_active_blocks")
    waste = Query(f"1 - {real_tokens} / ({active_blocks} * $encoder_block_size)")
    churn = [
        Query(rate(f"{DEVICE}_evictions"), "evicted blocks {{model_name}}"),
        Query(rate(f"{DEVICE}_misses"), "encoded items {{model_name}}"),
        Query(f"{rate('vllm:mm_cache_queries')} - {rate('vllm:mm_cache_hits')}", "first-seen items {{model_name}}"),
    ]
    ranks = [
        lines(
            f"{state.capitalize()} blocks per rank",
            says,
            "suffix:blocks",
            [Query(per_rank(f"{DEVICE}_{state}_blocks"), rank)],
            width=6,
        )
        for state, says in PER_RANK
    ]
    every_state = " + ".join(per_rank(f"{DEVICE}_{state}_blocks") for state, _ in PER_RANK)
    return Row(
        "3 device encoder cache: occupancy",
        [
            areas(
                "Blocks, all ranks",
                "Blocks by state, summed over the ranks: the top stays at ranks x (encoder_cache.num_blocks - 1).",
                "suffix:blocks",
                by_state,
            ),
            lines(
                "Padding waste",
                "Share of the active blocks that is padding, for the encoder block size entered above: over one half, "
                "choose a smaller encoder_cache.block_size.",
                "percentunit",
                [waste],
            ),
            lines(
                "Evictions and re-encodes",
                "Evictions with more encoded than first-seen items mean that evicted images come back and are encoded "
                "again: raise encoder_cache.num_blocks.",
                "suffix:/s",
                churn,
            ),
            *ranks,
            lines(
                "All blocks per rank",
                "Active, free and held blocks of each rank together: less than encoder_cache.num_blocks - 1 is a leak.",
                "suffix:blocks",
                [Query(every_state, rank)],
                width=6,
            ),
        ],
    )


def kv_cache() -> Row:
    return Row(
        "KV cache",
        [
            lines(
                "KV cache usage",
                "Share of the KV blocks in use: near 100 % requests wait for blocks or are preempted.",
                "percentunit",
                [Query(gauge("vllm:kv_cache_usage_perc", over="max"))],
                width=12,
            ),
            lines(
                "Preemptions",
                "Requests per second that gave up their KV blocks and are recomputed: raise kv_cache.num_blocks or "
                "lower scheduler.max_num_seqs.",
                "reqps",
                [Query(rate("vllm:num_preemptions"))],
                width=12,
            ),
        ],
    )


def connector() -> Row:
    tier, name = "model_name, tier", "{{tier}} {{model_name}}"
    moved = [Query(rate(f"{CONNECTOR}_{way}s", tier), f"{way}s {name}") for way in ("load", "save")]
    volume = [Query(rate(f"{CONNECTOR}_{way}_bytes", tier), f"{way}s {name}") for way in ("load", "save")]
    return Row(
        "Encoder cache connector",
        [
            lines(
                "Hit rate per tier",
                "Share of the items looked up in a tier that were found, and so loaded instead of encoded.",
                "percentunit",
                [Query(f"{rate(f'{CONNECTOR}_hits', tier)} / {rate(f'{CONNECTOR}_queries', tier)}", name)],
            ),
            lines(
                "Loads and saves per tier",
                "Items read from and written to each tier per second: saves without loads mean that nothing returns.",
                "suffix:items/s",
                moved,
            ),
            lines(
                "Bytes per tier",
                "Bytes read from and written to each tier per second: compare with what its storage can do.",
                "Bps",
                volume,
            ),
        ],
        collapsed=True,
    )
