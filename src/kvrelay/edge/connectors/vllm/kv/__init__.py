"""KV sharing for vLLM: a connector out of the engine's tree, and a secondary tier for its own offloading.

Only `connector`, `setup`, `stats`, `pages`, `staging`, `worker` and `native_tier` need vLLM or torch, and nothing
outside this folder imports them; the rest can be imported anywhere.
"""
