"""Fields of LMCache's configuration that have no counterpart here, and why each of them is not needed or not safe."""

from __future__ import annotations

_OWN_MEMORY = "how LMCache manages its own memory; our tiers bound theirs by `bytes`"
_STATISTICS = "statistics of LMCache; ours are on /metrics and in receipts"
_ADMIN = "LMCache's own admin port; the connector's `report` port listens on loopback only"
_CONTROLLER = "LMCache's controller; the gateway is what knows who holds what here"
_HIDDEN = "hidden states of multi-stage models, which are not KV"

NOT_NEEDED: dict[str, str] = {
    "local_cpu_use_hugepages": _OWN_MEMORY,
    "reserve_local_cpu_size": _OWN_MEMORY,
    "enable_lazy_memory_allocator": _OWN_MEMORY,
    "lazy_memory_initial_ratio": _OWN_MEMORY,
    "lazy_memory_expand_trigger_ratio": _OWN_MEMORY,
    "lazy_memory_step_ratio": _OWN_MEMORY,
    "lazy_memory_safe_size": _OWN_MEMORY,
    "pin_timeout_sec": _OWN_MEMORY,
    "pin_check_interval_sec": _OWN_MEMORY,
    "numa_mode": _OWN_MEMORY,
    "py_enable_gc": _OWN_MEMORY,
    "local_disk_path_sharding": "objects are spread over sub-folders by their names",
    "use_layerwise": "loads run beside the computation, saves layer by layer; there is no other mode",
    "enable_async_loading": "loads are always asynchronous",
    "use_gpu_connector_v3": "which of LMCache's ways to touch GPU memory; ours is chosen by the device",
    "pre_caching_hash_algorithm": "names are keyed digests, equal in every process; PYTHONHASHSEED is not needed",
    "save_unfull_chunk": "whole chunks only; a smaller `chunk_size` leaves a shorter tail to compute",
    "min_retrieve_tokens": "break-even decides from measured rates whether a load is worth it",
    "priority_limit": "every request may use the store; break-even decides",
    "hit_miss_ratio": "only for LMCache's tests of itself",
    "enable_kv_events": "what a worker loads shows in the engine's own KV events",
    "lookup_server_worker_ids": "look-ups are made in the scheduler's process",
    "enable_scheduler_bypass_lookup": "look-ups are made in the scheduler's process",
    "retrieve_locations": "tiers are asked in their order",
    "store_location": "tiers are written in their order; see `write` of a tier",
    "cost_aware_half_life_seconds": "belongs to a cache policy that is not ours",
    "cost_aware_ewma_alpha": "belongs to a cache policy that is not ours",
    "lmcache_instance_id": _CONTROLLER,
    "lmcache_worker_ports": _CONTROLLER,
    "lmcache_worker_ids": _CONTROLLER,
    "lmcache_worker_heartbeat_delay_time": _CONTROLLER,
    "lmcache_worker_heartbeat_time": _CONTROLLER,
    "controller_pull_url": _CONTROLLER,
    "controller_reply_url": _CONTROLLER,
    "internal_api_server_enabled": _ADMIN,
    "internal_api_server_host": _ADMIN,
    "internal_api_server_port_start": _ADMIN,
    "internal_api_server_include_index_list": _ADMIN,
    "internal_api_server_socket_path_prefix": _ADMIN,
    "enable_chunk_statistics": _STATISTICS,
    "chunk_statistics_auto_start_statistics": _STATISTICS,
    "chunk_statistics_auto_exit_timeout_hours": _STATISTICS,
    "chunk_statistics_auto_exit_target_unique_chunks": _STATISTICS,
    "chunk_statistics_strategy": _STATISTICS,
    "max_hidden_state_cpu_size": _HIDDEN,
    "hidden_state_layers": _HIDDEN,
    "hidden_states_retrieve_mode": _HIDDEN,
    "blend_recompute_ratios": "only together with enable_blending",
    "blend_thresholds": "only together with enable_blending",
    "blend_check_layers": "only together with enable_blending",
    "blend_min_tokens": "only together with enable_blending",
    "blend_special_str": "only together with enable_blending",
    "mp_host": "only for LMCache's own server process",
    "mp_port": "only for LMCache's own server process",
    "p2p_host": "only together with enable_p2p",
    "p2p_init_ports": "only together with enable_p2p",
    "p2p_lookup_ports": "only together with enable_p2p",
}

# Switches that would change what is computed or who runs code, and are refused when they are on.
REFUSED_WHEN_ON: dict[str, str] = {
    "enable_blending": "joins KV that was computed in other contexts, which changes what the model answers; "
    "only exact prefixes are reused here",
    "enable_pd": "hands KV from a prefill worker to a decode worker; use `kv_role` kv_producer and kv_consumer of the "
    "connector instead",
    "enable_p2p": "copies between workers by LMCache's own protocol; use a tier with a peer:// URL",
    "enable_controller": "the gateway does this here; leave the switch off",
    "enable_hidden_state_cache": _HIDDEN,
}

_CODE = "loads code into the engine from a name in a configuration file"
_DIRECT = "needs a storage path from the GPU that no tier here has; use file:// or a remote tier"

# Refused when they are set to anything.
REFUSED_WHEN_SET: dict[str, str] = {
    "runtime_plugin_locations": _CODE,
    "storage_plugins": _CODE,
    "remote_storage_plugins": _CODE,
    "external_backends": _CODE,
    "plugin_locations": _CODE,
    "script_allowed_imports": _CODE,
    "external_lookup_client": "asks a service outside for what is there; the tiers are asked themselves",
    "remote_config_url": "takes further settings from a server at start, which this reader cannot see or judge",
    "app_id": "only together with remote_config_url",
    "audit_actual_remote_url": "wraps another remote; name that one in `remote_url`",
    "gds_path": _DIRECT,
    "maru_path": _DIRECT,
    "nixl_backends": _DIRECT,
    "nixl_buffer_size": _DIRECT,
    "nixl_buffer_device": _DIRECT,
    "transfer_channel": _DIRECT,
    "extra_config": "its members are read by plug-ins of LMCache and mean nothing here; remove what is not needed",
}

# Belong to switches that are refused or off; with them off they do nothing.
ONLY_WITH_A_SWITCH = ("pd_", "gds_", "maru_", "use_gds", "nixl_")
