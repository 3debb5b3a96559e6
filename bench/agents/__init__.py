"""Traffic of agents over two workers: who reuses what, and does it stay balanced?"""
