"""kvrelay: prefix-cache-aware routing, tiered KV sharing and evidence for fleets of LLM inference workers."""

__version__ = "0.1.0"
