"""Weights of the cache_load policy, chosen by a rule that was stated before anything was measured."""
